// An answer as it comes: the chunks of a stream put together, and when each of them came.

export function newAnswer(model) {
  return {
    role: "assistant",
    model,
    content: "",
    reasoning: "",
    toolCalls: [],
    state: "streaming", // then done, stopped or failed
    finish: null,
    error: null,
    timing: { first: null, rest: 0, chunks: 0, usage: null }, // ms to the first token and from it to the last; chunks
  };
}

/** A clock of one answer; `absorb(chunk)` puts a chunk into the answer. */
export function follow(answer, now = () => performance.now()) {
  const start = now();
  const tick = () => {
    const { timing } = answer;
    const time = now() - start;
    timing.first ??= time;
    timing.rest = time - timing.first;
    timing.chunks += 1;
  };
  return function absorb(chunk) {
    if (chunk.usage) answer.timing.usage = readUsage(chunk.usage);
    const [choice] = chunk.choices ?? [];
    if (!choice) return;
    if (addDelta(answer, choice.delta ?? {})) tick();
    answer.finish = choice.finish_reason ?? answer.finish;
  };
}

/** Add what a delta brings; says whether it brought anything. */
function addDelta(answer, { content, reasoning_content: reasoning, tool_calls: calls }) {
  answer.content += content ?? "";
  answer.reasoning += reasoning ?? "";
  for (const call of calls ?? []) addCall(answer.toolCalls, call);
  return Boolean(content || reasoning || calls?.length);
}

const MOST_CALLS = 128;

/** Add a part of a call; an upstream may say anything, so an index that is no place among the calls is left out. */
function addCall(toolCalls, { index = 0, id, function: part = {} }) {
  if (!Number.isInteger(index) || index < 0 || index > Math.min(toolCalls.length, MOST_CALLS)) return;
  const call = (toolCalls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  call.id ||= id ?? "";
  call.function.name += part.name ?? "";
  call.function.arguments += part.arguments ?? "";
}

function readUsage({ prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details }) {
  return { prompt, tokens, cached: details?.cached_tokens ?? 0 };
}

/** The timing in words: time to the first token, tokens per second after it, tokens. */
export function describeTiming({ first, rest, chunks, usage }) {
  if (first === null) return "";
  const tokens = usage?.tokens ?? chunks;
  const facts = [
    `TTFT ${first < 1000 ? `${first.toFixed(0)} ms` : `${(first / 1000).toFixed(2)} s`}`,
    rest > 0 && chunks > 2 && `${((1000 * (tokens - 1)) / rest).toFixed(1)} tok/s`,
    `${tokens} ${tokens === 1 ? "token" : "tokens"}`,
    usage && `prompt ${usage.prompt}${usage.cached ? `, ${usage.cached} cached` : ""}`,
  ];
  return facts.filter(Boolean).join(" · ");
}
