"""Random numbers are a function of the seed, the position and the draw."""

from llmc.runtime.sampling.draws import uniform, uniforms


def test_numbers_of_a_position_are_those_of_their_draws() -> None:
    numbers = uniforms(7, 123)
    assert [next(numbers) for _ in range(5)] == [uniform(7, 123, draw) for draw in range(5)]
