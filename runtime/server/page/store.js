// Conversations in the browser's IndexedDB; where the browser has none, in memory until the page is left.

export async function openStore() {
  try {
    return databaseStore(await openDatabase());
  } catch {
    return memoryStore();
  }
}

function openDatabase() {
  const opening = indexedDB.open("llmc", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
  return settle(opening);
}

function settle(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function databaseStore(database) {
  const store = (mode) => database.transaction("conversations", mode).objectStore("conversations");
  return {
    lasts: true,
    readAll: () => settle(store("readonly").getAll()),
    read: (id) => settle(store("readonly").get(id)),
    write: (conversation) => settle(store("readwrite").put(conversation)),
    remove: (id) => settle(store("readwrite").delete(id)),
    clear: () => settle(store("readwrite").clear()),
  };
}

function memoryStore() {
  const ignore = async () => {};
  return { lasts: false, readAll: async () => [], read: ignore, write: ignore, remove: ignore, clear: ignore };
}
