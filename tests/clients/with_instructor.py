"""Instructor, in the modes in which a grammar enforces the schema.

`JSON` and `MD_JSON` only describe it in the prompt, and `PARALLEL_TOOLS` leaves the call to the model: a model of 135 M
parameters does neither.
"""

import instructor
import openai
from checks import KEY, LONG, MODEL, QUESTION, V1, Box, Size, main, raises
from instructor import Mode

client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": f"{QUESTION} Answer with a box."}]
asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 200, "max_retries": 0}


def create(mode, response_model=Box, **options):
    return instructor.from_openai(client, mode=mode).chat.completions.create(
        response_model=response_model, **{**asked, **options}
    )


class Checks:
    def structured(self):
        for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
            assert isinstance(create(mode), Box), mode

    def responses_tools(self):
        made = instructor.from_openai(client, mode=Mode.RESPONSES_TOOLS).responses.create(
            model=MODEL, input=QUESTION, response_model=Box, temperature=0, max_output_tokens=200, max_retries=0
        )
        assert isinstance(made, Box)

    def stream(self):
        parts = list(
            instructor.from_openai(client, mode=Mode.TOOLS).chat.completions.create_partial(
                response_model=Size, **asked
            )
        )
        assert parts[-1].width

    def iterable(self):
        made = instructor.from_openai(client, mode=Mode.JSON_SCHEMA).chat.completions.create_iterable(
            response_model=Size, **asked
        )
        assert all(isinstance(one, Size) for one in made)

    def wrong_input(self):
        error = raises(Exception, create, Mode.TOOLS, temperature=-1)
        assert "temperature" in str(error)

    def overflow(self):
        error = raises(Exception, create, Mode.TOOLS, messages=[{"role": "user", "content": LONG}])
        assert "context_length_exceeded" in str(error), error


main("instructor", Checks())
