"""LlamaIndex's embeddings of servers that speak as OpenAI's does."""

from checks import EMBEDDER, KEY, QUESTION, TEXTS, V1, check_vectors, main
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

model = OpenAILikeEmbedding(model_name=EMBEDDER, api_base=V1, api_key=KEY, embed_batch_size=2, max_retries=0)


class Checks:
    def embeddings(self):
        check_vectors(model.get_text_embedding_batch(TEXTS), model.get_query_embedding(QUESTION))

    async def embeddings_async(self):
        check_vectors(await model.aget_text_embedding_batch(TEXTS), await model.aget_query_embedding(QUESTION))


main("llama-index-embeddings-openai-like", Checks())
