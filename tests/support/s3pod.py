"""An S3 server with the files of a folder in it, as a pod's process: `python -m tests.support.s3pod PORT FOLDER`."""

import sys
import time
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer

BUCKET, PREFIX = "models", "tiny"
KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    ThreadedMotoServer("0.0.0.0", port, verbose=False).start()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=BUCKET)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{path.relative_to(folder)}", Body=path.read_bytes())
    print("ready", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
