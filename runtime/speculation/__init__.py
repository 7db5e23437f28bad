"""Speculation: guess the next tokens cheaply, have the model check them in one call, lose nothing.

:func:`verify` is why nothing is lost; a :class:`Drafter` guesses; :class:`DraftLength` decides how much guessing pays;
:class:`Speculator` joins them for one sequence.
"""
