import json
import pytest
from websockets.sync.client import connect
@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")
def test_smoke(address, client):
    with client.responses.connect() as c:
        for kw in ({}, {"stream_id":"a"}, {"generate": False}, {"reasoning":{"summary":"auto"}}):
            c.response.create(model="tiny", input="Hello", max_output_tokens=8, temperature=0, store=False, **kw)
            for e in c:
                print(e.to_json(indent=None)[:300])
                if e.type in ("response.completed","response.incomplete","error","response.failed"): last=e; break
    assert 0
