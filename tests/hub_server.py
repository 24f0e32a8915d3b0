"""A local server that speaks the part of the hub's HTTP interface that pushing and downloading a model need.

Repositories and branches are made, files are asked about, large ones go by LFS (batch, then put), a commit names all
of them, and what was committed is listed and downloaded. `server.refuses`: words of paths to answer with 403;
`server.is_slow`: half a second passes between the digests of large files and their contents.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE = (".safetensors", ".png", ".bin")  # go by LFS


class Server(ThreadingHTTPServer):
    """`branches`: (repository, name) -> commit, `commits`: commit -> {file: content}, `put`: the numbers of bytes that
    came by LFS."""

    def __init__(self, token: str):
        super().__init__(("127.0.0.1", 0), Hub)
        self.token, self.url = token, f"http://127.0.0.1:{self.server_port}"
        self.branches, self.commits, self.objects = {}, {"0" * 40: {}}, {}
        self.refuses, self.put, self.is_slow = [], [], False


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.is_refused():
            return
        path, server = self.path.partition("?")[0], self.server
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            server.branches.setdefault((repo, "main"), "0" * 40)
            self.answer({"url": f"{server.url}/{repo}"})
        elif found := re.fullmatch(r"/api/models/(.+)/branch/(.+)", path):
            repo, name = found.groups()
            server.branches.setdefault((repo, name), server.branches[repo, "main"])
            self.answer({})
        elif "/preupload/" in path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(LARGE) else "regular" for name in files}
            self.answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{server.url}/lfs/{one['oid']}"}}
            time.sleep(0.5 * server.is_slow)
            self.answer({"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/(.+)", path):
            self.commit(*found.groups(), [json.loads(line) for line in body.splitlines()])
        else:
            self.answer({"errors": [], "warnings": []})

    def commit(self, repo, branch, lines):
        files = dict(self.server.commits[self.server.branches[repo, branch]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        oid = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.server.commits[oid] = files
        self.server.branches[repo, branch] = oid
        self.answer({"commitUrl": f"{self.server.url}/{repo}/commit/{oid}", "commitOid": oid})

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.objects[oid] = content
        self.server.put.append(len(content))
        self.answer({})

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if self.is_refused():
            return
        path = self.path.partition("?")[0]
        if not any(repo in path for repo, _ in self.server.branches):
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif found := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            oid, content = self.at(found[1], found[2])
            self.answer_file(content[found[3]], oid)
        elif found := re.fullmatch(r"/api/models/(.+?)/tree/([^/]+)", path):
            files = self.at(found[1], found[2])[1]
            self.answer([self.entry(name, content) for name, content in files.items()])
        elif found := re.fullmatch(r"/api/models/(.+?)(?:/revision/([^/]+))?", path):
            oid, files = self.at(found[1], found[2] or "main")
            self.answer({"id": found[1], "sha": oid, "siblings": [{"rfilename": name} for name in files]})

    def at(self, repo, revision):
        oid = self.server.branches.get((repo, revision), revision)
        return oid, self.server.commits[oid]

    def entry(self, name, content):
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def answer_file(self, content, oid):
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": oid}
        self.send(200, content, headers | {"Content-Type": "application/octet-stream"})

    def is_refused(self) -> bool:
        is_allowed = self.headers.get("Authorization") == f"Bearer {self.server.token}" or "validate-yaml" in self.path
        refused = [words for words in self.server.refuses if words in self.path]
        if is_allowed and not refused:
            return False
        self.send(403, b'{"error": "you may not"}', {"X-Error-Message": "you may not"})
        return True

    def answer(self, content):
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send(self, code, content, headers):
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *words):
        pass


@contextmanager
def running(token: str) -> Iterator[Server]:
    server = Server(token)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
