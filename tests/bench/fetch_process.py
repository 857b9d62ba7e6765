"""The server of bench_fetch: one file, as an S3 bucket and as a hub, with ranges, through sendfile. Prints its port."""

import hashlib
import sys
from pathlib import Path

from aiohttp import web

LIST = """<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>models</Name><Prefix>m/</Prefix>
<KeyCount>2</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"""
OBJECT = "<Contents><Key>m/{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{etag}</ETag><Size>{size}</Size></Contents>"  # noqa: E501


def application(folder: Path) -> web.Application:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}

    def etag(name: str) -> str:
        stat = (folder / name).stat()
        return f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'  # as aiohttp makes it for a file

    async def s3_list(_: web.Request) -> web.Response:
        contents = "".join(OBJECT.format(name=name, etag=etag(name), size=size) for name, size in sizes.items())
        return web.Response(text=LIST.format(contents=contents), content_type="application/xml")

    async def hub_info(request: web.Request) -> web.Response:
        siblings: list[dict[str, object]] = [
            {"rfilename": name, "size": size, "blobId": hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()}
            for name, size in sizes.items()
        ]
        for row in siblings:
            if str(row["rfilename"]).endswith(".safetensors"):
                row["lfs"] = {"sha256": sys.argv[2], "size": row["size"], "pointerSize": 134}
            else:
                row["blobId"] = None
        return web.json_response({"id": "team/m", "sha": "a" * 40, "siblings": siblings})

    async def content(request: web.Request) -> web.FileResponse:
        return web.FileResponse(folder / request.match_info["name"], chunk_size=1 << 20)

    app = web.Application()
    app.router.add_get("/models", s3_list)
    app.router.add_get("/models/m/{name}", content)
    app.router.add_get("/api/models/team/m", hub_info)
    app.router.add_get("/team/m/resolve/{commit}/{name}", content)
    return app


if __name__ == "__main__":
    web.run_app(application(Path(sys.argv[1])), host="127.0.0.1", port=int(sys.argv[3]), print=None, access_log=None)
