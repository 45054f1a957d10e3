// The server's endpoints as this page uses them. Paths are relative, so that the page works under any prefix.

import { authorization } from "./settings.js";

/** An answer with an error object, or none. `status` is the HTTP status, 200 inside a stream that had begun. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function ready() {
  return (await fetch("ready")).json();
}

export async function status() {
  const response = await fetch("v1/status", { headers: authorization() });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

/** The chunks of a streamed chat answer. Raises ApiError; aborted by the signal, an AbortError. */
export async function* streamChat(request, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization() },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  let isDone = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      isDone = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 200);
    yield chunk;
  }
  if (!isDone) throw new ApiError("the connection ended before the answer did", 200);
}

/** The data of each server-sent event; comments are passed over. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice("data: ".length);
    }
  }
}

async function errorOf(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not an error object: something between the page and the server answered.
  }
  const wait = response.headers.get("retry-after");
  return new ApiError(wait ? `${message} (try again in ${wait} s)` : message, response.status);
}
