"""Writes expected.json: what Jinja2, set up as Transformers sets it up, makes of the templates here.

Run with Python 3.11, Jinja2 3.1.6: python make.py
"""
import datetime
import glob
import json

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2025, 7, 10, 12, 0, 0)


class Generation(jinja2.ext.Extension):
    """Marks answers for training; for rendering the block does nothing."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda format: NOW.strftime(format)
    return env


def render(template, variables):
    variables = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
    try:
        return {"text": environment().from_string(template).render(**variables)}
    except jinja2.exceptions.TemplateError as error:
        return {"error": type(error).__name__}
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        return {"error": type(error).__name__}


CHAT = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "  What is 2 + 2?\n"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *CHAT]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> & 'numbers' \"é\"",
        "parameters": {
            "type": "object",
            "properties": {"items": {"type": "array", "items": {"type": "number"}, "description": "What to add"}},
            "required": ["items"],
        },
    },
}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

DATA = {
    "s": "  Hello, World  ",
    "empty": "",
    "word": "straße ÉCLAIR don't",
    "n": 7,
    "f": 2.5,
    "big": 1e20,
    "neg": -3,
    "yes": True,
    "nothing": None,
    "list": [3, 1, 2],
    "mixed": ["a", 1, 1.5, True, None, "it's", 'say "x"', "é\n\t\\"],
    "dict": {"b": 1, "a": "x", "items": [1], "nested": {"k": [1, {"z": None}]}},
    "objs": [{"n": "x", "v": 1}, {"n": "y", "v": 2}, {"n": "x", "v": 3}],
    "json": {"quote": '"', "tag": "<a href='x'>&</a>", "uni": "é中😀\u2028", "ctl": "\u0001\b\f\n\r\t\u007f", "nums": [1, -2, 1.0, 1e-7, 1e16, 123456789.125], "none": None, "t": True, "e": [], "o": {}},
}

FEATURES = [
    # printing
    "{{ yes }} {{ nothing }} {{ n }} {{ f }} {{ big }} {{ list }} {{ mixed }} {{ dict }}",
    "{{ missing }}|{{ dict.missing }}|{{ missing or 'x' }}",
    "{{ missing.attribute }}",
    "{{ dict.missing.attribute }}",
    "{{ nothing.attribute }}|",
    "{{ yes ~ nothing ~ n ~ f ~ list ~ missing }}",
    "{{ 'a' + 1 }}",
    "{{ 'a' + missing }}",
    "{{ [1] + [2, 3] }} {{ 'ab' * 3 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ 2 ** 5 }} {{ 7 / 2 }} {{ 6 / 2 }}",
    "{{ 1 / 0 }}",
    "{{ (1, 2) }} {{ (1,) }} {{ {'a': 1, 2: 'b'} }}",
    "{{ 1.0 }} {{ 1e3 }} {{ 0.1 + 0.2 }} {{ 100000000000000000.0 }} {{ 1_000 }}",
    # conditions
    "{% if missing %}a{% elif empty %}b{% elif list %}c{% endif %}",
    "{{ 'a' if missing is defined else 'b' }}{{ 'c' if missing }}",
    "{{ missing is none }} {{ nothing is none }} {{ s is string }} {{ dict is mapping }} {{ list is iterable }} {{ s is iterable }} {{ list is sequence }} {{ n is number }} {{ n is integer }} {{ f is float }} {{ yes is boolean }} {{ yes is true }} {{ n is true }} {{ yes is false }} {{ s is not string }}",
    "{{ 1 in list }} {{ 9 in list }} {{ 'ell' in s }} {{ 'a' in dict }} {{ 'x' not in dict }} {{ 'a' in missing }}",
    "{{ n is divisibleby 7 }} {{ n is odd }} {{ n is even }} {{ n == 7.0 }} {{ n is eq 7 }} {{ 'a' < 'b' }} {{ 1 < 2 <= 2 }} {{ not yes }} {{ yes and n }} {{ empty or 'z' }}",
    "{{ list is sameas list }} {{ missing is undefined }} {{ 'lower' is lower }} {{ 'UP' is upper }} {{ n in [7, 8] }}",
    # strings
    "{{ s.strip() }}|{{ s.lstrip() }}|{{ s.rstrip() }}|{{ s.upper() }}|{{ s.lower() }}|{{ s.title() }}|{{ word.capitalize() }}|{{ word.title() }}",
    "{{ 'xxaxx'.strip('x') }} {{ 'a,b,c'.split(',') }} {{ 'a b  c'.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.split(',')[-1] }} {{ 'a,b,c'.rsplit(',', 1) }}",
    "{{ s.startswith('  H') }} {{ s.endswith(('x', '  ')) }} {{ 'abcabc'.find('c') }} {{ 'abcabc'.rfind('c') }} {{ 'abcabc'.find('z') }} {{ 'abcabc'.count('bc') }} {{ 'aXbX'.replace('X', '-') }} {{ 'aXbX'.replace('X', '-', 1) }}",
    "{{ ','.join(['a', 'b']) }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ 'a=b=c'.partition('=') }} {{ 'a=b=c'.rpartition('=') }} {{ '7'.zfill(3) }} {{ '-7'.zfill(4) }}",
    "{{ 'ab1'.isalnum() }} {{ 'ab'.isalpha() }} {{ '12'.isdigit() }} {{ ' '.isspace() }} {{ 'a\nb'.splitlines() }} {{ 'aBc'.swapcase() }} {{ 'abc'.index('c') }}",
    "{{ '{} and {name}'.format('a', name='b') }} {{ '%s-%d' | format('a', 3) }} {{ '%s' % 'x' }}",
    "{{ 'hello'[1:3] }} {{ 'hello'[-1] }} {{ 'hello'[::-1] }} {{ list[1:] }} {{ list[:-1] }} {{ list[::-1] }} {{ list[-1] }} {{ list[5:] }}",
    "{{ ''[::-1] }}|{{ [][::-1] }}|{{ 'abc'[:0:-1] }}|{{ 'abcdef'[4:1:-2] }}|{{ 'abc'[:6:-1] }}|{{ list[-2:] }}|{{ 'abc'[-9:9] }}|{{ 'abc'[::9] }}|{{ (1, 2, 3)[1:] }}|{{ range(5)[1:3] | list }}|{{ list[1:][0] }}",
    "{{ 'abc'[::0] }}",
    "{{ n[1:] }}",
    "{{ missing[1:] }}",
    "{{ nothing[1:] }}",
    "{{ dict[1:] }}",
    "{{ list[9] }}|{{ 'abc'[9] }}|{{ dict['zz'] }}|",
    "{{ 'a' 'b' }} {{ 'tab\\tnl\\\\ \\u00e9 \\'q\\'' }}",
    # dicts and lists
    "{% for k, v in dict.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k in dict %}{{ k }};{% endfor %}{% for k in dict.keys() %}{{ k }};{% endfor %}{% for v in dict.values() %}{{ v }};{% endfor %}",
    "{{ dict.get('a') }} {{ dict.get('zz') }} {{ dict.get('zz', 5) }} {{ dict['a'] }} {{ dict.a }} {{ dict['items'] }} {{ dict.nested.k[1].z }}",
    "{% for k, v in dict | items %}{{ k }}{% endfor %} {% for k, v in dict | dictsort %}{{ k }}{% endfor %} {{ dict | length }} {{ list | count }}",
    "{{ dict | list }} {{ 'abc' | list }} {{ {'a': 1}.copy() }}",
    # loops
    "{% for x in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }} {% endfor %}",
    "{% for x in list %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}",
    "{% for x in [] %}a{% else %}none{% endfor %}{% for x in list if x > 1 %}{{ x }}{% endfor %}{% for x in missing %}z{% endfor %}",
    "{% for x in list %}{{ loop.previtem }}-{{ loop.nextitem }};{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for x in range(3) %}{{ x }}{% endfor %}{% for x in range(5, 1, -2) %}{{ x }}{% endfor %}{{ range(2) | list }}",
    "{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{% endfor %}",
    "{% for x in nothing %}a{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
    # set, namespace, macros
    "{% set x = 1 %}{% for i in list %}{% set x = i %}{% endfor %}{{ x }}",
    "{% set ns = namespace(x=1, y='a') %}{% for i in list %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.y }}{{ ns.z }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set block %}in {{ a }}{% endset %}{{ block }}{{ block | upper }}",
    "{% macro m(a, b='d', *rest) %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1) }}{{ m(1, b=2) }}{{ m() }}",
    "{% macro outer() %}<{{ caller() }}>{% endmacro %}{% call outer() %}x{% endcall %}",
    "{% macro rec(n) %}{{ n }}{% if n > 0 %}{{ rec(n - 1) }}{% endif %}{% endmacro %}{{ rec(5) }}",
    "{% with q = 3 %}{{ q }}{% endwith %}{{ q }}",
    "{% set d = dict %}{{ d.a }}",
    "{{ list.append(4) }}",
    # filters
    "{{ mixed | join(', ') }} {{ objs | map(attribute='n') | join('') }} {{ objs | selectattr('n', 'equalto', 'x') | list }} {{ objs | rejectattr('n', 'equalto', 'x') | map(attribute='v') | list }}",
    "{{ list | sort }} {{ list | sort(reverse=true) }} {{ objs | sort(attribute='v', reverse=true) | map(attribute='v') | list }} {{ list | reverse | list }} {{ 'abc' | reverse }} {{ list | first }} {{ list | last }} {{ list | sum }} {{ list | min }} {{ list | max }}",
    "{{ missing | default('d') }} {{ empty | default('d') }} {{ empty | default('d', true) }} {{ nothing | default('d') }} {{ s | trim }} {{ s | length }} {{ 'a b' | wordcount }} {{ word | title }} {{ word | capitalize }} {{ word | lower }} {{ word | upper }}",
    "{{ '12' | int }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ '1.5' | float }} {{ 3.7 | int }} {{ 2.567 | round(1) }} {{ 2.5 | round }} {{ neg | abs }} {{ n | string }} {{ 'a-b' | replace('-', '+') }}",
    "{{ 'a\nb\n\nc' | indent(2) }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\nb' | indent(width=3, first=True) }}",
    "{{ [1, 2, 1, 3] | unique | list }} {{ list | batch(2) | list }} {{ [1, 2, 3, 4] | select('even') | list }} {{ [1, 2] | reject('odd') | list }} {{ ['a', 'B'] | map('upper') | list }} {{ [0, 1, ''] | select | list }}",
    "{% for g in objs | groupby('n') %}{{ g.grouper }}:{{ g.list | length }};{% endfor %}{{ '<a>' | e }} {{ '<a>' | safe }}",
    "{{ json | tojson }}",
    "{{ json | tojson(indent=2) }}|{{ [] | tojson(indent=4) }}|{{ {'a': []} | tojson(indent=4) }}",
    "{{ mixed | tojson }} {{ 'x' | tojson }} {{ nothing | tojson }} {{ dict | tojson(sort_keys=true) }} {{ dict | tojson(separators=(',', ':')) }} {{ json.uni | tojson(ensure_ascii=true) }}",
    "{{ missing | tojson }}",
    "{% filter upper %}abc{{ n }}{% endfilter %}",
    # whitespace
    "a\n{% if yes %}\n  b\n{% endif %}\nc\n",
    "a\n  {%- if yes -%}\n  b\n  {%- endif -%}\n  c\n\n",
    "   {% if yes %}x{% endif %}   \n   {# comment #}\n  y {{- ' z ' -}} w",
    "{% if yes +%}\n x{% endif %}\n  {%+ if yes %}y{% endif %}",
    "{% raw %}{{ x }}{% endraw %}{# c #}{{ '{{' }}",
    "{% generation %}answer{% endgeneration %} {%- generation -%}  b  {%- endgeneration %}",
    # special functions
    "{{ strftime_now('%d %b %Y, %A %H:%M') }} {{ strftime_now('%Y-%m-%d') }}",
    "{{ raise_exception('no ' ~ n) }}",
    "{% if raise_exception is defined %}x{% endif %}{{ strftime_now is defined }}",
    "{{ tools is none }} {{ tools is defined }} {{ documents }} {{ add_generation_prompt }}",
    "{% set j = joiner(', ') %}{% for x in list %}{{ j() }}{{ x }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}",
    "{{ dict(a=1, b=2) }}",
    "{% if x is defined and x.y %}{% endif %}{{ undefined_function() }}",
    "{{ loop }}|{{ self is defined }}",
    "{% set x = namespace() %}{% set x.y = [] %}{% set x.y = x.y + ['a'] %}{{ x.y }}",
    "{{ 'a' is in ['a'] }} {{ messages[0]['role'] }} {{ messages | length }} {{ (messages | last).content | trim }} {{ messages[-1:][0].role }} {{ messages[1:] | length }}",
    "{{ '\\n' in 'a\nb' }} {{ 'x' ~ 1 + 2 }} {{ 1 + 2 ~ 'x' }} {{ -n }} {{ +n }} {{ not n == 7 }} {{ n if n > 5 else 0 }}",
    "{% for m in messages %}{{ loop.index }}{% if not loop.last %}, {% endif %}{% endfor %}",
    "{{ {'a': {'b': [10, 20]}}.a.b[1] }} {{ 'abc' | first }} {{ 'abc' | last }} {{ 12345 | string | length }} {{ '3' | int + 4 }}",
    "{% if n > 5 and (s is string or missing) and not (nothing) %}ok{% endif %}{{ [1, 2] == [1, 2] }} {{ {'a': 1} == {'a': 1} }} {{ none == nothing }} {{ 1 == true }} {{ '1' == 1 }}",
    "{{ lipsum is defined }} {{ namespace is defined }} {{ range is callable }} {{ 'a'.upper is callable }}",
    "{{ None }} {{ True }} {{ False }} {{ none }} {{ true }}",
    "{{ dict.items() | list }} {{ dict.keys() | list }} {{ dict.values() | list | length }}",
    "{% block content %}inside{% endblock %}",
    "{% for key in dict %}{% if dict[key] is string %}{{ key }}{% elif dict[key] is mapping %}m{% elif dict[key] is sequence %}s{% endif %}{% endfor %}",
    "{% unknown %}",
    "{{ unclosed",
    "{% if yes %}",
    "{{ s | nofilter }}",
]


def main():
    conversations = {
        "chat": {"messages": CHAT, "add_generation_prompt": True},
        "system": {"messages": SYSTEM, "add_generation_prompt": False},
        "tools": {"messages": CHAT[:1], "tools": [TOOL], "add_generation_prompt": True},
    }
    cases = []
    for path in sorted(glob.glob("llama.cpp-templates/*.jinja")):
        template = open(path).read()
        for name, variables in conversations.items():
            cases.append({"template": path, "case": name, **render(template, {**SPECIALS, **variables})})
    recorded = json.load(open("huggingface-jinja-e2e.json"))
    again = [{"template": r["name"], **render(r["chat_template"], r["data"])} for r in recorded]
    features = [{"source": f, **render(f, {"messages": CHAT, **DATA})} for f in FEATURES]
    builtin = []
    for path in sorted(glob.glob("../../crates/text/src/template/builtin/*.jinja")):
        template = open(path).read()
        for name in ("chat", "system"):
            variables = {**SPECIALS, **conversations[name]}
            builtin.append({"template": path.split("/")[-1], "case": name, **render(template, variables)})
    out = {
        "conversations": conversations,
        "specials": SPECIALS,
        "data": {"messages": CHAT, **DATA},
        "llama_cpp": cases,
        "recorded": again,
        "features": features,
        "builtin": builtin,
    }
    with open("expected.json", "w") as file:
        json.dump(out, file, ensure_ascii=False, indent=1)
        file.write("\n")


main()
