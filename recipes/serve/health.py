"""Check the service on this machine for a container: exit with 0 if it is healthy.

    python health.py [/ready]

``PORT`` is the service's port (8000); ``PROBE_KEY`` a key, which /ready requires. A service with a certificate is
queried over TLS without checking the certificate, since the address is this machine's.
"""

import os
import ssl
import sys
import urllib.request
from http.client import HTTPException


def ask(path: str) -> None:
    """Raise OSError or HTTPException unless the service answers 200, over plain HTTP or TLS."""
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    address = f"127.0.0.1:{os.environ.get('PORT', '8000')}{path}"
    key = os.environ.get("PROBE_KEY", "").strip()  # a file's line end
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        urllib.request.urlopen(urllib.request.Request(f"http://{address}", headers=headers), timeout=2)
    except urllib.error.HTTPError:
        raise  # the service answered
    except (OSError, HTTPException):
        request = urllib.request.Request(f"https://{address}", headers=headers)
        urllib.request.urlopen(request, timeout=2, context=unchecked)


if __name__ == "__main__":
    try:
        ask(sys.argv[1] if len(sys.argv) > 1 else "/health")
    except (OSError, HTTPException) as error:
        sys.exit(str(error))
