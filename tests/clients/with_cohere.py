"""Cohere's client: rerank, in both versions."""

import cohere
from checks import EMBEDDER, KEY, QUESTION, TEXTS, URL, main, raises

first, second = cohere.Client(KEY, base_url=URL), cohere.ClientV2(KEY, base_url=URL)


class Checks:
    def rerank(self):
        answer = second.rerank(model=EMBEDDER, query=QUESTION, documents=TEXTS[::-1], top_n=2)
        assert [one.index for one in answer.results][:1] == [len(TEXTS) - 1]
        assert len(answer.results) == 2
        assert answer.results[0].relevance_score > answer.results[1].relevance_score

    def rerank_v1(self):
        answer = first.rerank(model=EMBEDDER, query=QUESTION, documents=TEXTS, return_documents=True)
        assert answer.results[0].document.text == TEXTS[0]

    def wrong_input(self):
        raises(cohere.BadRequestError, second.rerank, model=EMBEDDER, query=QUESTION, documents=[])


main("cohere", Checks())
