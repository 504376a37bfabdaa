# `llm` with an endpoint of extra-openai-models.yaml: API_KEY is in the environment, the path of llm the argument.
set -eu
llm=$1
"$llm" keys set hotset --value "$API_KEY"
whole=$("$llm" -m hotset --no-stream -o temperature 0 -o max_tokens 32 "ok")
streamed=$("$llm" -m hotset -o temperature 0 -o max_tokens 32 "ok")
test -n "$whole"
test "$whole" = "$streamed"
"$llm" -m hotset -o temperature 0 -o max_tokens 32 -s "be brief" "ok" >/dev/null
"$llm" -c -o temperature 0 -o max_tokens 8 "and now?" >/dev/null  # with the conversation before it
if "$llm" -m hotset --key wrong "ok" >/dev/null 2>&1; then
  echo "a wrong key was taken"
  exit 1
fi
echo "whole, stream, system, conversation, a wrong key"
