#!/bin/sh
# Submit `copyhold serve` or `copyhold demo` as a job of a running Ray cluster, which it joins.
# Usage: submit.sh [options of ray job submit] -- serve|demo [options of copyhold]
# Variables: RAY_API_SERVER_ADDRESS (the head's dashboard, http://HOST:8265), RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH where the
# cluster wants a token, SHIP=1 to send this checkout's package to nodes that have only its dependencies.
set -eu
cd "$(dirname "$0")/../.."

seen=
for word in "$@"; do
    shift
    if [ -z "$seen" ] && [ "$word" = -- ]; then
        seen=1
        if [ "${SHIP:-}" = 1 ]; then
            set -- "$@" --runtime-env deploy/ray-job/runtime_env.shipped.yaml -- python -m copyhold
        else
            set -- "$@" --runtime-env deploy/ray-job/runtime_env.yaml -- copyhold
        fi
    else
        set -- "$@" "$word"
    fi
done
if [ -z "$seen" ]; then
    sed -n '2,5s/^# //p' deploy/ray-job/submit.sh >&2
    exit 2
fi
exec ray job submit "$@" --address auto
