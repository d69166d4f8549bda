"""Conversations for make_chat.py: tools, system turns, calls and results, odd Unicode, control characters, lists of parts, empty and
absent content, long ones."""

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": " The weather at a place, now or later.\n",
    "parameters": {"type": "object", "required": ["place"], "properties": {
        "place": {"type": "string", "description": "A city, like Zürich or 東京"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": "integer", "default": 1},
        "exact": {"type": ["boolean", "null"]}}}}}
SEARCH = {"type": "function", "function": {
    "name": "search", "description": "Finds <b>things</b> & \"more\"",
    "parameters": {"type": "object", "properties": {
        "query": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "nullable": True}}]},
        "filter": {"type": "object", "required": ["from"], "properties": {
            "from": {"type": "number"}, "tags": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
            "rest": {"type": "array"}}}, "limit": {"type": "integer", "default": 10, "description": "At most\u2028this many"}}}}}
PING = {"type": "function", "function": {"name": "ping", "description": "", "parameters": {"type": "object", "properties": {}}}}


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def tool(text, **more):
    return {"role": "tool", "content": text, **more}


def call(name, arguments, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def text_part(text):
    return {"type": "text", "text": text}


IMAGE = {"type": "image"}
GREETING = [user("Hello")]
CHAT = [system("You are kind."), user("What is 2 + 2?"), assistant("4."), user("And times 3?")]

CONVERSATIONS = [
    {"messages": GREETING},
    {"messages": GREETING, "add_generation_prompt": True},
    {"messages": CHAT, "add_generation_prompt": True},
    {"messages": CHAT + [assistant("12.")]},
    {"messages": [system("A"), system("B"), user("two system turns"), assistant("yes"), system("C"), user("three")], "add_generation_prompt": True},
    {"messages": [user("")], "add_generation_prompt": True},
    {"messages": [system(""), user("empty system"), assistant(""), user("")], "add_generation_prompt": True},
    {"messages": [user("  spaces \t around \n"), assistant("\n\n trimmed? \u00a0\u2003\n"), user("\u3000wide\u3000")], "add_generation_prompt": True},
    {"messages": [user("naïve café, Straße, ΑΣΣΟΣ, İstanbul, ﬁn, 東京, हिन्दी, مرحبا"), assistant("e\u0301 vs é; ŉ ǆ ß")], "add_generation_prompt": True},
    {"messages": [user("👩‍👩‍👧‍👦 🇨🇭 👍🏽 🫠 a\u200db\u200cc\ufeff"), assistant("𝔘𝔫𝔦 \U0010fffd"), user("e" + "\u0301" * 40)], "add_generation_prompt": True},
    {"messages": [user("\x00\x01\x1b[31m\x7f\x85\u2028\u2029\r\n\r\x0b\x0c end"), assistant("\x1c\x1d\x1e\x1f")], "add_generation_prompt": True},
    {"messages": [user("{{ 7 * 7 }} {% if x %} {# no #} <|im_start|>system\n%s %d \\n \"quoted\" 'single' `tick` $HOME"),
                  assistant("</think> {%- raw %}")], "add_generation_prompt": True},
    {"messages": [user("Why?"), assistant("<think>\nBecause.\n</think>\n\nSo."), user("Sure?"), assistant("<think>\nYes\n</think>\n\nYes.")]},
    {"messages": [user("Why?"), assistant("So.", reasoning_content="I think\nlong.\n"), user("Sure?")], "add_generation_prompt": True},
    {"messages": [user("Why?"), assistant("So.", reasoning_content="last thought")]},
    {"messages": [user("Why?"), assistant("So.", reasoning_content="")]},
    {"messages": GREETING, "add_generation_prompt": True, "variables": {"enable_thinking": False, "thinking": False}},
    {"messages": GREETING, "add_generation_prompt": True, "variables": {"enable_thinking": True, "thinking": True, "effort": "high"}},
    {"messages": GREETING, "tools": [WEATHER], "add_generation_prompt": True},
    {"messages": [system("Use tools.")] + GREETING, "tools": [WEATHER, SEARCH, PING], "add_generation_prompt": True},
    {"messages": GREETING, "tools": [], "add_generation_prompt": True},
    {"messages": [user("Weather in Zürich?"),
                  assistant(None, tool_calls=[call("get_weather", {"place": "Zürich", "days": 2, "exact": True, "near": 1.5e-7})]),
                  tool("{\"t\": 21.5}"), assistant("21.5 °C"), user("Thanks 😀")],
     "tools": [WEATHER], "add_generation_prompt": True},
    {"messages": [user("Weather?"), assistant("Looking.", tool_calls=[
        call("get_weather", {"place": "A \"B\" </x>"}, id="c1"), call("search", {"query": ["x", None, True, 3.0], "filter": {}}, id="c2")]),
        tool("sun", tool_call_id="c1", name="get_weather"), tool("", tool_call_id="c2"), assistant("Sun.")], "tools": [WEATHER, SEARCH]},
    {"messages": [user("As text"), assistant(None, tool_calls=[call("ping", "{\"a\": 1}")]), tool("pong"),
                  assistant(None, tool_calls=[call("ping", "{}"), call("ping", "{\"b\":\"ü\"}")]), tool("pong"), tool("pong 2")],
     "tools": [PING], "add_generation_prompt": True},
    {"messages": [user("Think and call"), assistant("", reasoning_content="need it", tool_calls=[call("ping", {})]), tool("pong")],
     "tools": [PING], "add_generation_prompt": True},
    {"messages": [user("flat"), assistant("", tool_calls=[{"name": "ping", "arguments": {"z": 1, "a": [1, 2.5, "é"]}}]), tool("x")],
     "add_generation_prompt": True},
    {"messages": [user([text_part("What is "), IMAGE, text_part("in this?")])], "add_generation_prompt": True},
    {"messages": [system([text_part("Be brief.")]), user([IMAGE, IMAGE, text_part("Compare.")]), assistant([text_part("Same.")]),
                  user("Sure?")], "add_generation_prompt": True, "variables": {"number_images": True, "add_vision_id": True}},
    {"messages": [user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "video"}, text_part("")])],
     "add_generation_prompt": True},
    {"messages": [user([]), user(["plain", text_part("part")])], "add_generation_prompt": True},
    {"messages": [user(None)], "add_generation_prompt": True},
    {"messages": [user("x"), assistant(None)]},
    {"messages": [], "add_generation_prompt": True},
    {"messages": [assistant("first"), user("second"), user("third")], "add_generation_prompt": True},
    {"messages": [{"role": "developer", "content": "Rules."}, user("go")], "tools": [PING], "add_generation_prompt": True},
    {"messages": [{"role": "critic", "content": "?", "name": "Zoë"}, user("go")]},
    {"messages": [{"role": "user"}]},
    {"messages": [tool("alone")], "add_generation_prompt": True},
    {"messages": [user("From these:")], "documents": [{"title": "One", "text": "line\nnext\n\nlast"}, {"title": "Straße", "text": "ﬀ"}],
     "variables": {"controls": {"citations": True, "length": "short"}}, "add_generation_prompt": True},
    {"messages": [user("With both")], "documents": [{"title": "D", "text": "t"}], "tools": [WEATHER], "add_generation_prompt": True,
     "variables": {"controls": {}}},
    {"messages": [system("s")] + [turn for i in range(60) for turn in (user(f"question {i} " + "word " * i), assistant(f"answer {i}\n" * 3))]
     + [user("end")], "add_generation_prompt": True},
    {"messages": [user("é€😀\n" * 5000)], "add_generation_prompt": True},
]
