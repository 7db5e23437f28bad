// Conversations as a file: written as JSON, and read again without believing anything that stands in it.
import { newAnswer } from "./answer.js";
import { isImageUrl } from "./images.js";
import { NO_SETTINGS } from "./settings.js";

const FORMAT = "llmc conversations";
const VERSION = 1;
const STATES = ["done", "stopped", "failed"];

export function toText(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 2);
}

/** A conversation as a text that is the same for every order of its members. */
export function toKey(conversation) {
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const sorted = (value) => Object.fromEntries(Object.keys(value).sort().map((name) => [name, value[name]]));
  return JSON.stringify(conversation, (_, value) => (isObject(value) ? sorted(value) : value));
}

/** The conversations in a text; where it holds something else, an Error that names the place. Unknown members are left out. */
export function fromText(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`it is not JSON: ${error.message}`);
  }
  check(file?.format === FORMAT && file.version === VERSION, "it", `what “Export as JSON” writes, version ${VERSION}`);
  return readList(file.conversations, "conversations").map((each, at) => readConversation(each, `conversations[${at}]`));
}

function check(holds, where, expected) {
  if (!holds) throw new Error(`${where} is something else than ${expected}`);
}

function readList(value, where) {
  check(Array.isArray(value), where, "a list");
  return value;
}

/** The members of an object that `kinds` names, each of the type of its example. */
function readMembers(value, kinds, where) {
  check(value !== null && typeof value === "object", where, "an object");
  return Object.fromEntries(Object.entries(kinds).map(([name, example]) => {
    check(typeof value[name] === typeof example, `${where}.${name}`, `a ${typeof example}`);
    return [name, value[name]];
  }));
}

function readConversation(value, where) {
  const found = readMembers(value, { id: "", title: "", updated: 0 }, where);
  const known = new Set([null]); // parents stand before what follows them, so there are no circles
  const messages = readList(value.messages, `${where}.messages`).map((each, at) => {
    const message = readMessage(each, `${where}.messages[${at}]`);
    check(known.has(message.parent) && !known.has(message.id), `${where}.messages[${at}].parent`, "a message before it");
    known.add(message.id);
    return message;
  });
  check(messages.length > 0, `${where}.messages`, "a list of messages");
  check(known.has(value.leaf) && value.leaf !== null, `${where}.leaf`, "one of its messages");
  return { ...found, settings: readSettings(value.settings, `${where}.settings`), messages, leaf: value.leaf };
}

function readSettings(value, where) {
  const { numbers: _, ...texts } = NO_SETTINGS;
  const found = readMembers(value, { ...texts, numbers: {} }, where);
  check(found.numbers !== null, `${where}.numbers`, "an object");
  const numbers = Object.entries(found.numbers).map(([name, text]) => [name, String(text)]);
  return { ...found, numbers: Object.fromEntries(numbers) };
}

function readMessage(value, where) {
  const found = readMembers(value, { id: "", role: "", content: "" }, where);
  const parent = value.parent;
  if (found.role === "user") return { ...found, parent, ...readImages(value.images, `${where}.images`) };
  if (found.role === "tool") return { ...found, parent, ...readMembers(value, { toolCallId: "" }, where) };
  check(found.role === "assistant", `${where}.role`, "user, assistant or tool");
  return { ...newAnswer(""), ...found, parent, ...readAnswer(value, where) };
}

function readImages(value, where) {
  if (value === undefined) return {};
  const images = readList(value, where).map((each, at) => {
    const image = readMembers(each, { name: "", url: "" }, `${where}[${at}]`);
    check(isImageUrl(image.url), `${where}[${at}].url`, "a PNG, JPEG or WebP in base64");
    return image;
  });
  check(images.length > 0, where, "a list of images");
  return { images };
}

function readAnswer(value, where) {
  const calls = readList(value.toolCalls, `${where}.toolCalls`);
  return {
    ...readMembers(value, { model: "", reasoning: "" }, where),
    toolCalls: calls.map((call, at) => readCall(call, `${where}.toolCalls[${at}]`)),
    state: STATES.includes(value.state) ? value.state : "stopped",
    finish: typeof value.finish === "string" ? value.finish : null,
    error: value.error ? { detail: "", ...readMembers(value.error, { message: "" }, `${where}.error`) } : null,
    timing: readTiming(value.timing, `${where}.timing`),
  };
}

function readCall(value, where) {
  const called = readMembers(value?.function, { name: "", arguments: "" }, `${where}.function`);
  return { ...readMembers(value, { id: "" }, where), type: "function", function: called };
}

function readTiming(value, where) {
  check(value !== null && typeof value === "object", where, "an object");
  const gaps = readList(value.gaps, `${where}.gaps`).map(Number);
  const usage = value.usage ? readMembers(value.usage, { prompt: 0, tokens: 0, cached: 0 }, `${where}.usage`) : null;
  return { first: typeof value.first === "number" ? value.first : null, gaps: gaps.filter(Number.isFinite), usage };
}
