"""By a manifest's origin the node cache tells whose word it takes: one address at two hosts is two origins."""

import json

from shoal.artifacts.bucketkeys import host


def test_a_bucket_of_a_server_that_the_secret_names_is_not_the_clouds() -> None:
    key = {"client_email": "a@b", "private_key": "x"}
    hosts = [
        host({}),
        host({"endpoint": "https://evil.example"}),
        host({"account_name": "acme"}),
        host({"account_name": "acme", "endpoint": "https://evil.example"}),
        host({"service_account_key": json.dumps(key | {"gcs_base_url": "https://evil.example/gcs"})}),
        host({"service_account_key": "not JSON"}),
    ]
    assert len(set(hosts)) == len(hosts)
    # Whose account it is does not matter: the source is asked with each.
    other = {"client_email": "c@d", "private_key": "y"}
    assert host({"service_account_key": json.dumps(key)}) == host({"service_account_key": json.dumps(other)}) == ""
