"""A hub on this machine: as much of the Hugging Face hub's protocol as pushing and pulling small files takes."""

import base64
import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Generator
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serving() -> Generator[tuple[str, dict[str, dict[str, bytes]]]]:
    """Yield the address, and the files of each repository."""
    repositories: dict[str, dict[str, bytes]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, body, code=200, headers=()):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            for name, value in {"Content-Length": str(len(data)), **dict(headers)}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def handle_any(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            if parts[:3] == ["api", "repos", "create"]:
                asked = json.loads(body)
                name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                repositories.setdefault(name, {})
                return self.answer({"url": f"{address}/{name}", "name": name, "id": name})
            if parts == ["api", "validate-yaml"]:
                return self.answer({"errors": [], "warnings": []})
            if parts[:2] == ["api", "models"]:
                name, what = "/".join(parts[2:4]), parts[4:]
                if name not in repositories:
                    return self.answer({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
                held = repositories[name]
                if what[:1] == ["preupload"]:
                    files = [{"path": x["path"], "uploadMode": "regular"} for x in json.loads(body)["files"]]
                    return self.answer({"files": [x | {"shouldIgnore": False} for x in files]})
                if what[:1] == ["commit"]:
                    for line in map(json.loads, body.splitlines()):
                        if line["key"] == "file":
                            held[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                    return self.answer({"commitUrl": f"{address}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
                if what[:1] == ["tree"]:
                    return self.answer([
                        {"type": "file", "path": path, "size": len(x), "oid": hashlib.sha1(x).hexdigest()}
                        for path, x in held.items()
                    ])  # fmt: skip
                if what[:1] in ([], ["revision"]):
                    siblings = [{"rfilename": path} for path in held]
                    return self.answer({"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
            if "resolve" in parts:
                at = parts.index("resolve")
                data = repositories.get("/".join(parts[:at]), {}).get("/".join(parts[at + 2 :]))
                if data is not None:
                    headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
                    return self.answer(data, headers=headers)
                return self.answer({}, 404, {"X-Error-Code": "EntryNotFound"})
            return self.answer({"error": "unknown here"}, 404)

        do_GET = do_HEAD = do_POST = handle_any  # noqa: N815  as the class names them

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield address, repositories
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
