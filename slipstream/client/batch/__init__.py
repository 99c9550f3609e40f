"""Files of requests in OpenAI's batch format, and their results."""
