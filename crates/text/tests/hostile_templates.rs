//! Chat templates made to hurt: whatever they do, they end within a second, 64 MiB and a stack of 512 KiB.

#[path = "../../../fuzz/checks/counting.rs"]
mod counting;

use std::time::Duration;

use sterna_text::{ChatInput, ChatTemplate, DateTime, SpecialTokens, TemplateError};

const STACK: usize = 512 << 10;
const MEMORY: usize = 64 << 20;
const TIME: Duration = Duration::from_secs(4);

/// How many templates are made up.
const GENERATED: u64 = 600;

fn input() -> ChatInput {
    ChatInput {
        now: Some(DateTime::from_unix(1_752_148_800, 0)),
        ..ChatInput::conversation([("user", "Hello, \"World\""), ("assistant", "é😀 ok")])
    }
}

/// Renders on a small stack; fails beyond the limits.
fn render(source: &str) -> (Result<String, TemplateError>, Duration, usize) {
    let input = input();
    let run = || {
        ChatTemplate::new(source, &SpecialTokens::default())
            .and_then(|template| template.render(&input))
    };
    let (result, mut time, memory) = counting::on_stack(STACK, || counting::cost(run));
    // Another process may have had the processor.
    for _ in 0..3 {
        if time > TIME {
            time = time.min(counting::cost(run).1);
        }
    }
    let name = || source.chars().take(1000).collect::<String>();
    assert!(time <= TIME, "{time:?}: {}", name());
    assert!(memory <= MEMORY, "{memory} bytes: {}", name());
    if let Err(error) = &result {
        let message = error.to_string();
        assert!(
            message.len() < 2000,
            "{} bytes of message: {}",
            message.len(),
            name()
        );
    }
    (result, time, memory)
}

#[track_caller]
fn refused(source: &str) {
    let (result, time, memory) = render(source);
    let start: String = source.chars().take(90).collect();
    match result {
        Err(error) => {
            println!("{start}: {time:?}, {} KiB, {error:.100}", memory >> 10);
        }
        Ok(prompt) => panic!("{start}: expected an error, found {} bytes", prompt.len()),
    }
}

/// Any answer within the limits will do.
fn bounded(source: &str) {
    let (result, time, memory) = render(source);
    let start: String = source.chars().take(90).collect();
    let outcome = match result {
        Ok(prompt) => format!("{} bytes", prompt.len()),
        Err(error) => format!("{error:.100}"),
    };
    println!("{start}: {time:?}, {} KiB, {outcome}", memory >> 10);
}

#[test]
fn without_end() {
    for source in [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}",
        "{% macro m() %}{% call m() %}x{% endcall %}{{ caller() }}{% endmacro %}{{ m() }}",
        "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% for i in range(100000) %}{{ 'aaaaaaaaaa' * 1000000 }}{% endfor %}",
        "{% set x = 'a' * 99999999 %}",
    ] {
        refused(source);
    }
}

#[test]
fn what_panicked() {
    refused("{% for i in [1] %}{{ loop.cycle() }}{% endfor %}");
    refused("{{ cycler() }}");
    bounded(
        "{{ -170141183460469231731687303715884105727 // -1 }}{{ (-170141183460469231731687303715884105727 - 1) // -1 }}",
    );
    bounded("{{ (-170141183460469231731687303715884105727 - 1) % -1 }}");
    bounded("{{ (-170141183460469231731687303715884105727 - 1) | abs }}");
    bounded("{{ 'abc'[-9223372036854775808:9223372036854775807:-9223372036854775808] }}");
    bounded(
        "{{ range(-170141183460469231731687303715884105727, 170141183460469231731687303715884105727, 2) }}",
    );
    bounded(
        "{{ range(170141183460469231731687303715884105727, -170141183460469231731687303715884105727, -170141183460469231731687303715884105727) }}",
    );
    bounded(
        "{{ 'é' | indent(-1) }}{{ '%c' | format(55296) }}{{ '{:é>5}'.format('é') }}{{ '{:+,}'.format(-1234567) }}",
    );
    bounded("{{ [3, 'a', none, 1.5, [2], {'a': 1}, missing, (1,)] | sort }}");
}

#[test]
fn namespaces_in_themselves() {
    for use_ in [
        "{{ n }}",
        "{{ n == n }}",
        "{{ n == m }}",
        "{{ n ~ 'x' }}",
        "{{ n | string }}",
        "{{ [n, m] | sort }}",
        "{{ n in [m] }}",
        "{{ {n: 1} }}",
        "{{ {n: 1}[m] }}",
        "{{ '%s' | format(n) }}",
        "{{ '{}'.format(n) }}",
        "{{ [[n]] }}",
        "{{ n | tojson }}",
        "{{ [n, m] | unique | list }}",
        "{{ [n, m] | join }}",
        "{{ n | pprint }}",
        "{{ [n, m] | max }}",
        "{{ n < m }}",
        "{{ raise_exception(n) }}",
        "{{ 'x' | replace(n, n) }}",
    ] {
        for own in ["n", "[n]", "{'a': n}", "(n, m)", "m"] {
            bounded(&format!(
                "{{% set n = namespace() %}}{{% set m = namespace() %}}{{% set n.a = {own} %}}{{% set m.a = n %}}{use_}"
            ));
        }
    }
    refused("{% set n = namespace() %}{% set n.a = n %}{{ n }}");
    refused("{% set n = namespace() %}{% set n.a = [n] %}{{ n }}");
    // Chains of macros that keep each other.
    bounded(
        "{% set n = namespace(p=1) %}{% for i in range(50000) %}{% set p = n.p %}{% macro m() %}{{ p }}{% endmacro %}{% set n.p = m %}{% endfor %}",
    );
    bounded(
        "{% set n = namespace(p=1) %}{% for i in range(50000) %}{% set n.p = joiner(n.p) %}{% endfor %}",
    );
    bounded(
        "{% set n = namespace(p=1) %}{% for i in range(50000) %}{% set n.p = cycler(n.p) %}{% endfor %}",
    );
    bounded(
        "{% set n = namespace(p=1) %}{% for i in range(50000) %}{% for j in [n.p] %}{% set n.p = loop %}{% endfor %}{% endfor %}",
    );
    bounded("{% for i in [1, 2] %}{{ loop.changed(loop) }}{% endfor %}");
    bounded("{% for i in range(30000) %}{% set n = namespace(a=namespace(b=i)) %}{% endfor %}");
}

#[test]
fn long_chains() {
    let emit = |start: &str, part: &str, n: usize, end: &str| {
        format!("{{{{ {start}{}{end} }}}}", part.repeat(n))
    };
    for n in [1_000, 4_000, 30_000] {
        for (start, part, end) in [
            ("1", "+1", ""),
            ("1", "-1", ""),
            ("1", "*1", ""),
            ("1", "**1", ""),
            ("1", "/1", ""),
            ("1", "//1", ""),
            ("1", "%2", ""),
            ("1", "~1", ""),
            ("1", "<1", ""),
            ("1", "==1", ""),
            ("1", " in[1]", ""),
            ("1", " not in[]", ""),
            ("1", " and 1", ""),
            ("1", " or 1", ""),
            ("", "not ", "1"),
            ("", "-", "1"),
            ("", "- ", "1"),
            ("", "+", "1"),
            ("1", " if 1 else 1", ""),
            ("1", " if 0 else 1", ""),
            ("messages", "[0]", ""),
            ("messages", ".a", ""),
            ("messages", "[:]", ""),
            ("messages", "()", ""),
            ("messages", ".a()", ""),
            ("1", "|abs", ""),
            ("'a'", "|upper", ""),
            ("1", " is odd", ""),
            ("1", " is not odd", ""),
            ("", "'a'", ""),
            ("[", "1,", "]"),
            ("{", "1:1,", "}"),
            ("dict(", "a=1,", ")"),
            ("", "(", ""),
            ("", "[", ""),
            ("", "{", ""),
            ("", "a(", ""),
            ("", "a[", ""),
            ("", "{1:", ""),
            ("", "1 is eq ", "1"),
            ("1", " if ", ""),
        ] {
            bounded(&emit(start, part, n, end));
        }
        let nested =
            |open: &str, close: &str| format!("{{{{ {}1{} }}}}", open.repeat(n), close.repeat(n));
        for (open, close) in [
            ("(", ")"),
            ("[", "]"),
            ("{1:", "}"),
            ("(1,", ")"),
            ("a(", ")"),
            ("a[", "]"),
            ("1+(", ")"),
            ("not(", ")"),
            ("-(", ")"),
            ("1|d(", ")"),
            ("1 if (", ") else 1"),
        ] {
            bounded(&nested(open, close));
        }
    }
    for n in [1_000, 8_000] {
        bounded(&format!(
            "{{% if 0 %}}{}{{% endif %}}",
            "{% elif 0 %}".repeat(n)
        ));
        for (open, close) in [
            ("{%if 1%}", "{%endif%}"),
            ("{%for i in [1]%}", "{%endfor%}"),
            ("{%with%}", "{%endwith%}"),
            ("{%macro m()%}", "{%endmacro%}"),
            ("{%set x%}", "{%endset%}"),
            ("{%filter upper%}", "{%endfilter%}"),
            ("{%generation%}", "{%endgeneration%}"),
            ("{%if 0%}{%else%}", "{%endif%}"),
        ] {
            bounded(&format!("{}{}", open.repeat(n), close.repeat(n)));
            bounded(&open.repeat(n));
        }
        bounded(&"{{ 1 }}".repeat(n));
        bounded(&"{#".repeat(n));
        bounded(&"{% raw %}".repeat(n));
        bounded(&format!(
            "{{% set {}a{} = 1 %}}",
            "(".repeat(n),
            ")".repeat(n)
        ));
        bounded(&format!("{{% set a{} = 1 %}}", ".a".repeat(n)));
        bounded(&format!("{{% set {} = 1 %}}", "a,".repeat(n)));
    }
    // The deepest that may nest still runs.
    let inner = "not(1<1+1~1*1**-[a[0](1|d(".repeat(9);
    bounded(&format!("{{{{ {inner}1{} }}}}", "))])".repeat(9)));
}

/// The most nested expression of a macro that calls itself.
#[test]
fn deep_recursion_of_deep_expressions() {
    for (open, close) in [
        ("(", ")"),
        ("[", "][0]"),
        ("{1:", "}[1]"),
        ("''~(", ")"),
        ("1 and (0 or (not ", ")) or 1"),
        ("d(1,", ")"),
        ("1|d(", ")"),
        ("''|replace('a',", ")"),
        ("[1]|map('d',", ")"),
        ("'a'.replace('a',", ")"),
        ("'%s'|format(", ")"),
        ("'%s'%(", ",)"),
        ("dict(a=", ")"),
        ("1 if (", ") else 1"),
    ] {
        for depth in [1, 5, 15, 25] {
            let body = format!("{}m(){}", open.repeat(depth), close.repeat(depth));
            bounded(&format!(
                "{{% macro m() %}}{{{{ {body} }}}}{{% endmacro %}}{{{{ m() }}}}"
            ));
            bounded(&format!(
                "{{% macro m() %}}{{% if 1 %}}{{% for i in [1] %}}{{% with %}}{{% set x %}}{{{{ {body} }}}}{{% endset %}}{{% endwith %}}{{% endfor %}}{{% endif %}}{{% endmacro %}}{{{{ m() }}}}"
            ));
            bounded(&format!(
                "{{% macro m() %}}{{% call m() %}}{{{{ {body} }}}}{{% endcall %}}{{% endmacro %}}{{{{ m() }}}}"
            ));
        }
    }
    // Values as deep as they may be, printed, compared and dropped at the bottom of a recursion.
    for use_ in [
        "{{ d }}",
        "{{ d == e }}",
        "{{ d | tojson }}",
        "{% set d = 1 %}{% set e = 1 %}",
    ] {
        bounded(&format!(
            "{{% set n = namespace(d=[], e=[]) %}}{{% for i in range(120) %}}{{% set n.d = [n.d] %}}{{% set n.e = [n.e] %}}{{% endfor %}}\
             {{% macro m(i, d, e) %}}{{% if i %}}{{{{ m(i - 1, [d][0], [e][0]) }}}}{{% else %}}{use_}{{% endif %}}{{% endmacro %}}\
             {{% for i in range(60) %}}{{{{ m(i, n.d, n.e) }}}}{{% endfor %}}"
        ));
    }
}

#[test]
fn memory() {
    for source in [
        "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
        "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
        "{% set x = 'a' * 1000000 %}{{ x.replace('', x) }}",
        "{% set x = 'a' * 1000000 %}{{ range(1000) | join(x) }}",
        "{% set x = 'a' * 1000000 %}{{ x.join(range(1000)) }}",
        "{{ [1] | slice(1000000000000) | list }}",
        "{{ [1] | batch(1000000000000, 0) | list }}",
        "{% set x %}{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}{% endset %}",
        "{% macro m() %}{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}{% endmacro %}{{ m() | length }}",
        "{% set x = 'a' * 1000000 %}{{ range(1000) | map('replace', '', x) | list }}",
        "{% set x = 'a' * 1000000 %}{{ ([x] * 1000) | join }}",
        "{% set x = 'a' * 1000000 %}{{ [x] * 1000 }}",
        "{% set x = 'a' * 1000000 %}{{ ([x] * 1000) | tojson }}",
        "{% set x = 'a' * 8000000 %}{{ x ~ x ~ x ~ x ~ x ~ x ~ x ~ x ~ x }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%.1000000000f' | format('a') }}",
        "{{ '%1000000000000000000000d' | format(1) }}",
        "{{ '%*d' | format(1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:é<1000000000}'.format('a') }}",
        "{{ 'a' | indent(1000000000, true) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}{{ 'a'.ljust(1000000000) }}",
        "{{ [1] * 1000000000000 }}",
        "{{ 'a' * 1000000000000 }}",
        "{% set x = 'a' * 3000000 %}{{ x | list }}",
        "{% set x = 'a ' * 3000000 %}{{ x.split() }}",
        "{% set x = '\n' * 3000000 %}{{ x.splitlines() }}{{ x | indent(1000) }}",
        "{% set n = namespace(x=[]) %}{% for i in range(100000) %}{% set n.x = n.x + ['a' * 1000] %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = [n.x, n.x] | string %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = [n.x, n.x] | tojson %}{% endfor %}",
        "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('aaaaaaaa') }}",
        "{% macro f(x, n) %}{{ x ~ f(x ~ 'a' * 1000000, n) }}{% endmacro %}{{ f('a', 1) }}",
        "{% for a in ['a' * 9000000] %}{% for b in [a ~ a] %}{% for c in [b ~ b] %}{{ c }}{% endfor %}{% endfor %}{% endfor %}",
        "{% set l = range(90000) | list %}{{ dict(a=l) | length(*l) }}",
        "{% set l = range(90000) | list %}{{ l | zip(l, l, l, l, l, l, l, l, l, l, l) | list | length }}",
        "{% set l = range(90000) | list %}{{ (l + l + l + l + l + l + l + l) | sort | length }}",
    ] {
        bounded(source);
    }
    for source in [
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a' | indent(1000000000, true) }}",
        "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
        "{% set x = 'a' * 1000000 %}{{ range(1000) | join(x) }}",
        "{{ [1] | batch(1000000000000, 0) | list }}",
        "{% set x %}{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}{% endset %}",
    ] {
        refused(source);
    }
    bounded(&format!(
        "{}{}",
        "{% set x %}".repeat(60),
        "a".repeat(100_000)
    ));
    bounded(&"[],".repeat(80_000));
    for part in [
        "[],", "1,", "a.b,", "-1,", "a(),", "a[1],", "'a',", "a|d,", "{},", "1+1,", "a[:],",
    ] {
        let n = (255 << 10) / part.len();
        bounded(&format!("{{{{ [{}] }}}}", part.repeat(n)));
        bounded(&format!("{{{{ [{} }}}}", part.repeat(n)));
    }
    for part in [
        "{{1}}",
        "{%if 1%}{%endif%}",
        "{%set a=1%}",
        "{%macro m()%}{%endmacro%}",
        "x{##}",
    ] {
        bounded(&part.repeat((255 << 10) / part.len()));
    }
    let names: String = (0..20_000).map(|n| format!("{{%set a{n}=1%}}")).collect();
    bounded(&names);
    bounded(&format!(
        "{{% macro m() %}}{names}{{{{ m() }}}}{{% endmacro %}}{{{{ m() }}}}"
    ));
    let attributes: String = (0..15_000).map(|n| format!("{{%set n.a{n}=1%}}")).collect();
    bounded(&format!("{{% set n = namespace() %}}{attributes}"));
}

#[test]
fn time() {
    let big = "{% set x = 'aé ' * 2000000 %}";
    for work in [
        "x | upper",
        "x | lower",
        "x | sort | length",
        "x.split() | length",
        "x | title",
        "x | length",
        "x | trim | length",
        "x.strip('aé ')",
        "x | replace('q', 'r') | length",
        "x.count('a')",
        "x.find('q')",
        "x == x ~ ''",
        "'q' in x",
        "x[::-1] | length",
        "x[-1]",
        "x | wordcount",
        "x.isalpha()",
        "x | reverse | length",
        "x | e | length",
        "x | tojson | length",
        "[x] | string | length",
        "x | int",
        "x | float",
        "x | first",
        "x | last",
        "x.startswith(x)",
        "x is lower",
        "x is startingwith x",
        "x.partition('q')",
        "x | capitalize | length",
        "x | urlencode | length",
        "x.splitlines() | length",
        "x | truncate(10)",
        "x.swapcase() | length",
        "[x, x] | unique | list | length",
        "[x, x] | max | length",
        "{x: 1}[x]",
        "x < x ~ 'a'",
        "x | batch(2) | length",
        "x.format()",
        "x | format",
        "strftime_now(x)",
        "x.removeprefix(x)",
        "x.rsplit('q', 1) | length",
        "x.lstrip() | length",
        "x is eq x ~ ''",
        "x | indent(1) | length",
        "x.join([1, 2]) | length",
        "raise_exception(x)",
        "x.encode()",
        "'%.400f' | format(1e308)",
        "'%e' | format(1e-308)",
        "'{:,.400f}'.format(-1e308)",
        "'%g' | format(5e-324)",
        "1e308 | round(300)",
        "5e-324 | round(400)",
        "1e308 | string",
        "5e-324 ~ x",
        "'1e308' | float",
        "9 ** 39",
        "1e308 % 3.7",
        "x | map('upper') | list",
        "x | select('in', 'a') | list | length",
        "x | groupby('a') | list | length",
    ] {
        for template in [
            format!("{big}{{% for i in range(100000) %}}{{{{ {work} }}}}{{% endfor %}}"),
            format!(
                "{big}{{% for i in range(100000) %}}{{% if {work} %}}{{% endif %}}{{% endfor %}}"
            ),
            format!(
                "{{% set x = 'ab' %}}{{% for i in range(100000) %}}{{% for j in range(1000) %}}{{% if {work} %}}{{% endif %}}{{% endfor %}}{{% endfor %}}"
            ),
        ] {
            bounded(&template);
        }
    }
    let list = "{% set x = range(90000) | list %}";
    for work in [
        "x | sort",
        "x | unique | list",
        "x == x + []",
        "x | sum",
        "x | max",
        "x | join",
        "x | string",
        "x | tojson",
        "x + x",
        "x * 3",
        "x[::-1]",
        "x | reverse | list",
        "x | map('abs') | list",
        "x | select('odd') | list",
        "x.count(1)",
        "'a' in x",
        "x | batch(3) | list",
        "x | slice(3) | list",
        "x | zip(x) | list",
        "x | list",
        "x | first",
        "x | last",
        "x[1:]",
        "x | chain(x) | list",
        "dict(a=x)",
        "x | groupby('a') | list",
        "x | map(attribute='a') | list",
        "[x, x] | sort",
        "x | length",
        "range(90000)",
        "x | sort(reverse=true)",
        "x | map('string') | sort",
        "'%s' | format(*x)",
        "x | dictsort",
    ] {
        bounded(&format!(
            "{list}{{% for i in range(100000) %}}{{% if {work} %}}{{% endif %}}{{% endfor %}}"
        ));
    }
}

#[test]
fn messages_of_errors_are_short() {
    let (result, ..) = render("{{ raise_exception('ab' * 4000000) }}");
    let message = result.unwrap_err().to_string();
    assert!(
        message.starts_with("the chat template refuses this conversation: abab"),
        "{message}"
    );
    assert!(message.ends_with("… (8000000 bytes)"), "{message}");
    let name = "a".repeat(100_000);
    for source in [
        format!("{{{{ x | {name} }}}}"),
        format!("{{{{ x is {name} }}}}"),
        format!("{{{{ 'x'.{name}() }}}}"),
        format!("{{{{ x.{name} }}}}"),
        format!("{{% {name} %}}"),
        format!("{{{{ range({name}=1) }}}}"),
        format!("{{{{ strftime_now('%Q{name}') }}}}"),
        format!("{{{{ 1 {name} }}}}"),
    ] {
        refused(&source);
    }
}

#[test]
fn a_conversation_that_is_too_long_says_so() {
    let template =
        ChatTemplate::new("{{ messages[0].content }}", &SpecialTokens::default()).unwrap();
    let long = "a".repeat(100_000_000);
    let error = template
        .render(&ChatInput::conversation([("user", long.as_str())]))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "conversation of 100000095 bytes, at most 67108864 are made a prompt"
    );
    // One of many megabytes is a prompt, however often the template copies it.
    let source = "{% set ns = namespace(x='') %}{% for m in messages %}{% set c = m.content | trim %}{% set ns.x = ns.x ~ c.replace('b', 'c').strip() %}{% endfor %}{{ ns.x }}";
    let template = ChatTemplate::new(source, &SpecialTokens::default()).unwrap();
    let long = "a".repeat(20_000_000);
    let prompt = template
        .render(&ChatInput::conversation([("user", long.as_str())]))
        .unwrap();
    assert_eq!(prompt, long);
}

#[test]
fn a_conversation_that_nests_deep_is_refused() {
    let template = ChatTemplate::new("{{ messages }}", &SpecialTokens::default()).unwrap();
    let mut value = serde_json::Value::Null;
    for _ in 0..300 {
        value = serde_json::Value::Array(vec![value]);
    }
    let input = ChatInput {
        messages: vec![value],
        ..ChatInput::default()
    };
    assert!(matches!(
        template.render(&input),
        Err(TemplateError::Render { .. })
    ));
}

// What is made up at random, from a seed.

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }
}

const FILTERS: [&str; 51] = [
    "abs",
    "attr",
    "batch",
    "bool",
    "capitalize",
    "chain",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "first",
    "float",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "lines",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "split",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "zip",
    "center",
];
const METHODS: [&str; 38] = [
    "upper",
    "lower",
    "strip",
    "lstrip",
    "rstrip",
    "replace",
    "split",
    "rsplit",
    "splitlines",
    "join",
    "format",
    "startswith",
    "endswith",
    "find",
    "rfind",
    "count",
    "index",
    "title",
    "capitalize",
    "zfill",
    "partition",
    "rpartition",
    "removeprefix",
    "removesuffix",
    "swapcase",
    "casefold",
    "items",
    "keys",
    "values",
    "get",
    "copy",
    "ljust",
    "rjust",
    "center",
    "cycle",
    "changed",
    "next",
    "isalpha",
];
const TESTS: [&str; 16] = [
    "odd",
    "even",
    "defined",
    "string",
    "mapping",
    "sequence",
    "iterable",
    "lower",
    "upper",
    "none",
    "in [1]",
    "eq(x)",
    "divisibleby 3",
    "sameas n",
    "lt(y)",
    "callable",
];
const ATOMS: [&str; 34] = [
    "x",
    "y",
    "n",
    "n.a",
    "n.b",
    "messages",
    "loop",
    "m",
    "m(x)",
    "m(m)",
    "1",
    "0",
    "-1",
    "1000000000000",
    "3.5",
    "''",
    "'a'",
    "'%s%9999d'",
    "'{}{:>99999}'",
    "'é '",
    "none",
    "true",
    "[]",
    "{}",
    "loop.cycle()",
    "range(99999)",
    "namespace()",
    "namespace(a=n)",
    "joiner(x)",
    "cycler(n)",
    "'a' * 1000000",
    "caller",
    "loop.index",
    "upper",
];

fn arguments(r: &mut Random, depth: usize) -> String {
    let n = r.below(4);
    let mut all = Vec::new();
    for _ in 0..n {
        let argument = match r.below(8) {
            0 => format!("'{}'", r.one(&FILTERS)),
            1 => "999999999999".to_owned(),
            2 => format!("attribute={}", r.one(&["'a'", "'a.b'", "0", "x"])),
            3 => format!("*({})", expression(r, depth)),
            _ => expression(r, depth),
        };
        all.push(argument);
    }
    all.sort_by_key(|argument| argument.starts_with("attribute"));
    all.join(", ")
}

fn expression(r: &mut Random, depth: usize) -> String {
    if depth == 0 {
        return r.one(&ATOMS).to_owned();
    }
    let depth = depth - 1;
    let e = |r: &mut Random| expression(r, depth);
    match r.below(13) {
        0 | 1 => {
            let op = r.one(&[
                "+", "~", "~", "*", "**", "/", "//", "%", "-", "==", "<", "in", "and", "or",
                "not in",
            ]);
            format!("({} {op} {})", e(r), e(r))
        }
        2..=4 => format!("({}) | {}({})", e(r), r.one(&FILTERS), arguments(r, depth)),
        5 | 6 => format!("({}).{}({})", e(r), r.one(&METHODS), arguments(r, depth)),
        7 => format!("[{}, {}]", e(r), e(r)),
        8 => format!("{{{}: {}}}", e(r), e(r)),
        9 => format!(
            "({})[{}]",
            e(r),
            r.one(&["0", "-1", "::-1", "1:", "'a'", "x", ":99999999999", "n"])
        ),
        10 => format!(
            "({} if ({}) is {} else {})",
            e(r),
            e(r),
            r.one(&TESTS),
            e(r)
        ),
        11 => {
            let op = r.one(&[
                "~ x", "+ x", "| string", "| list", ".a", "[0]", "| upper", "* 2", "| tojson",
                "and y",
            ]);
            let n = [3, 30, 3_000][r.below(3)];
            format!("(({}){})", e(r), format!(" {op}").repeat(n))
        }
        _ => format!("(not ({}))", e(r)),
    }
}

fn statements(r: &mut Random, depth: usize) -> String {
    let mut out = String::new();
    for _ in 0..1 + r.below(3) {
        let value = expression(r, 3);
        if depth == 0 {
            out.push_str(&format!("{{{{ {value} }}}}"));
            continue;
        }
        let inner = statements(r, depth - 1);
        let part = match r.below(13) {
            0 => format!("{{{{ {value} }}}}"),
            1 => format!(
                "{{% set {} = {value} %}}",
                r.one(&["x", "y", "n.a", "n.b", "x, y"])
            ),
            2 => {
                let grow = r.one(&[
                    "n.a ~ n.a",
                    "[n.a, n.a]",
                    "n.a + n.a",
                    "[n.a]",
                    "{'a': n.a, 'b': n}",
                    "n.a | string",
                    "(n.a, n)",
                ]);
                let times = r.one(&["30", "1000", "99999"]);
                format!("{{% for i in range({times}) %}}{{% set n.a = {grow} %}}{{% endfor %}}")
            }
            3 => format!(
                "{{% for x in {} %}}{inner}{{% endfor %}}",
                r.one(&["range(99999)", "n.a", "x", "messages", "'abc' * 99999"])
            ),
            4 => format!(
                "{{% for x in {value} recursive %}}{inner}{{{{ loop({}) }}}}{{% endfor %}}",
                r.one(&["[1]", "x", "[x, x]"])
            ),
            5 => format!(
                "{{% set {} %}}{inner}{{% endset %}}",
                r.one(&["x", "y", "n.a", "n.b"])
            ),
            6 => format!(
                "{{% macro m(x, y={}) %}}{inner}{{% endmacro %}}",
                r.one(&["1", "n", "x", "m"])
            ),
            7 => format!("{{% call m({value}) %}}{inner}{{% endcall %}}"),
            8 => format!("{{% if {value} %}}{inner}{{% elif x %}}{inner}{{% endif %}}"),
            9 => format!("{{% with x = {value} %}}{inner}{{% endwith %}}"),
            10 => format!("{{% filter {} %}}{inner}{{% endfilter %}}", r.one(&FILTERS)),
            11 => format!("{{% for i in range(99999) %}}{{{{ {value} }}}}{{% endfor %}}"),
            _ => format!(
                "{{% for i in range(99999) %}}{{% if {value} %}}{{% endif %}}{{% endfor %}}"
            ),
        };
        out.push_str(&part);
    }
    out
}

fn generated(seed: u64) -> String {
    let mut r = Random(seed);
    let x = r.one(&[
        "'a' * 1000000",
        "'a b' * 300000",
        "range(99999) | list",
        "'é'",
        "[1, 'a', none]",
        "messages",
        "1",
    ]);
    let own = r.one(&["n", "[n]", "'a'", "1", "[]", "'ab' * 1000000", "{'a': n}"]);
    let start = format!(
        "{{% set n = namespace(a='a', b=[1]) %}}{{% set n.{} = {own} %}}{{% set x = {x} %}}{{% set y = x %}}{{% macro m(x) %}}{}{{% endmacro %}}",
        r.one(&["a", "b"]),
        r.one(&[
            "{{ x }}",
            "{{ x ~ x }}",
            "{{ m(x) }}",
            "{{ caller() }}",
            "{% for i in x %}{{ i }}{% endfor %}",
            "{{ m([x]) }}{{ m(x ~ x) }}"
        ]),
    );
    start + &statements(&mut r, 2)
}

#[test]
fn templates_made_up_at_random() {
    let mut worst = (Duration::ZERO, 0);
    let (mut compiled, mut rendered) = (0, 0);
    for seed in 0..GENERATED {
        let source = generated(seed);
        compiled += u64::from(ChatTemplate::new(&source, &SpecialTokens::default()).is_ok());
        let (result, time, memory) = render(&source);
        rendered += u64::from(result.is_ok());
        worst = (worst.0.max(time), worst.1.max(memory));
    }
    println!(
        "{GENERATED} templates, {compiled} compiled, {rendered} rendered; at most {:?} and {} KiB",
        worst.0,
        worst.1 >> 10
    );
    assert!(compiled > GENERATED / 2, "{compiled} compiled");
}
