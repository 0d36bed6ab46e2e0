#!/bin/sh
# Asks the service with curl, whole and as a stream: sh examples/curl.sh [URL]
set -eu
url="${1:-http://127.0.0.1:8000}"

# A chat, as OpenAI's API has it; the last line is a knob of this service.
curl --silent --show-error --fail-with-body "$url/v1/chat/completions" \
    --header 'Content-Type: application/json' --data @- <<'JSON'
{
  "model": "demo",
  "messages": [{"role": "user", "content": "Wood shed, tool room and sick room are locked, and their keys hang in a steel box beside the door. The code of the key box is 48213. It is changed at the end of each season.\n\nWhat is the code of the key box?"}],
  "temperature": 0,
  "max_tokens": 24,
  "max_capacity_prompt": 64
}
JSON
echo

# The answer in pieces while it is generated; --no-buffer shows each as it comes. Where the service
# asks for a key, add --header "Authorization: Bearer $SNAPKV_CLIENT_KEY".
curl --silent --show-error --fail-with-body --no-buffer "$url/generate" \
    --header 'Content-Type: application/json' --data @- <<'JSON'
{
  "prompt": "The emergency channel is 31774. The battery lasts about two days.\n\nQuestion: What is the channel?\nAnswer: The channel is",
  "max_new_tokens": 8,
  "stream": true
}
JSON
