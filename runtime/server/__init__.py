"""The service: models behind the HTTP dialects that clients speak (extra ``serve``)."""
