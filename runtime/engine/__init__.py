"""From a request to its tokens: input processor, scheduler, output processor."""
