// Images of the user's, for models that see: read from files, and no larger than such models need.
import { iconButton, make } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp"]; // what the service takes
const LONGEST_SIDE = 1536; // pixels; a photograph of a telephone has then some 300 kB, and a chat has room for a dozen
const QUALITY = 0.9; // of JPEG and WebP that were made smaller
const MOST_BYTES = 6_000_000; // in base64 a third more, which leaves some of a request's 8 MiB for the rest

/** The image in a file, as an address that holds it; where there is none, an Error that says why. */
export async function readImage(file) {
  if (!TYPES.includes(file.type)) throw new Error("it is no PNG, JPEG or WebP");
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error("it cannot be decoded");
  });
  const scale = LONGEST_SIDE / Math.max(bitmap.width, bitmap.height);
  const blob = scale < 1 ? await shrink(bitmap, scale, file.type) : file;
  bitmap.close();
  if (blob.size > MOST_BYTES) {
    throw new Error(`it has ${(blob.size / 1e6).toFixed(1)} MB, at most ${MOST_BYTES / 1e6} can be sent; save it as a JPEG`);
  }
  return { name: file.name, url: await toUrl(blob) };
}

function shrink(bitmap, scale, type) {
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(scale * side)));
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.convertToBlob({ type, quality: QUALITY });
}

function toUrl(blob) {
  const reader = new FileReader();
  return new Promise((resolve, reject) => {
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("it cannot be read"));
    reader.readAsDataURL(blob);
  });
}

/** Show images in a list; where `removed` is given each can be taken off, and it is called then. */
export function showImages(list, images, removed = null) {
  const remove = (image) => {
    images.splice(images.indexOf(image), 1);
    showImages(list, images, removed);
    removed();
  };
  list.hidden = !images.length;
  list.replaceChildren(...images.map((image) => make("li", {},
    make("img", { src: image.url, alt: image.name }),
    removed && iconButton("close", `Take off “${image.name}”`, () => remove(image)))));
}
