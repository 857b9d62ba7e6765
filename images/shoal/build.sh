#!/bin/bash
# build.sh [NAME:TAG]: builds Shoal's image with what is there: docker, podman or buildah.
#
# Environment: BUILDER   docker, podman or buildah, instead of the first that works
#              DEV       1: with the engine simulator, for clusters without GPUs
#              BASE      another base image (see the Dockerfile)
#              ARGS      further arguments for the builder, such as "--platform linux/arm64" or "--isolation chroot"
set -eu
name=${1:-shoal:dev}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

works() { # is it there, and can it build? (a docker client without its daemon cannot)
    case $1 in
        docker | podman) command -v "$1" > /dev/null && "$1" info > /dev/null 2>&1 ;;
        buildah) command -v buildah > /dev/null ;;
        *) echo "build.sh: BUILDER is docker, podman or buildah, not '$1'" >&2; exit 2 ;;
    esac
}

builder=${BUILDER:-}
if [ -z "$builder" ]; then
    for candidate in docker podman buildah; do
        if works $candidate; then builder=$candidate; break; fi
    done
    if [ -z "$builder" ]; then
        echo "build.sh: found no docker (with its daemon), podman or buildah; on Debian: apt-get install buildah" >&2
        exit 1
    fi
elif ! works "$builder"; then
    echo "build.sh: $builder does not work here" >&2
    exit 1
fi

if ! ls "$root"/images/shoal/rootfs/opt/shoal/models/*/config.json > /dev/null 2>&1; then
    echo "build.sh: the examples' models are missing: run 'make models' first" >&2
    exit 1
fi

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
# shellcheck disable=SC2086 # ARGS are several words
"$builder" build ${ARGS:-} ${BASE:+--build-arg "BASE=$BASE"} ${DEV:+--build-arg "DEV=$DEV"} --build-arg "VERSION=$version" \
    --file "$here/Dockerfile" --tag "$name" "$root"
echo "built $name with $builder"
