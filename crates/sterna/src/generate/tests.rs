//! Generators driven by hand, on a model that is a function of the last tokens.

use proptest::prelude::*;
use sterna_engine::SamplerConfig;

use super::*;

const N_VOCAB: u32 = 7;

/// The logits that follow `tokens`: they depend on the last two, so that texts repeat themselves.
fn model(tokens: &[u32]) -> Vec<f32> {
    let at = |back: usize| tokens.iter().rev().nth(back).copied().unwrap_or(N_VOCAB);
    let logit = |id: u32| {
        let mixed = (at(0) * 31 + at(1) * 17 + id * 101 + 7).wrapping_mul(2_654_435_761);
        (mixed >> 24) as f32 / 64.0
    };
    (0..N_VOCAB).map(logit).collect()
}

fn sampler(config: SamplerConfig) -> Sampler {
    Sampler::new(config, N_VOCAB as usize).unwrap()
}

/// Computes what `generator` needs, on a sequence that holds the tokens `held`.
fn compute(held: &mut Vec<u32>, generator: &mut Generator, max_ids: usize) -> bool {
    let tokens = generator.tokens().to_vec();
    let Some(wanted) = generator.wanted(max_ids) else {
        return false;
    };
    assert!((1..=max_ids).contains(&wanted.ids.len()));
    assert!(wanted.keep <= held.len() && held[..wanted.keep] == tokens[..wanted.keep]);
    held.truncate(wanted.keep);
    let mut rows = Vec::new();
    for &id in wanted.ids {
        held.push(id);
        rows.push(model(held));
    }
    let given = match wanted.logits {
        Logits::None => Given::Nothing,
        Logits::All => Given::Logits(rows.concat()),
        Logits::Last | Logits::Top(_) => Given::Logits(rows.pop().unwrap()),
    };
    generator.give(given);
    true
}

/// The answer to `request` by definition: a token at a time.
fn by_definition(request: &Request, ctx_len: usize) -> (Vec<u32>, StopReason) {
    let mut sampler = request.sampler.clone();
    let mut tokens = request.prompt.clone();
    tokens.iter().for_each(|&id| sampler.accept(id));
    let n_prompt = tokens.len();
    let reason = loop {
        if tokens.len() - n_prompt == request.max_tokens {
            break StopReason::MaxTokens;
        }
        if tokens.len() == ctx_len + 1 {
            break StopReason::ContextFull;
        }
        let id = sampler.sample(&model(&tokens));
        if request.stop_ids.contains(&id) {
            break StopReason::StopToken;
        }
        sampler.accept(id);
        tokens.push(id);
    };
    (tokens.split_off(n_prompt), reason)
}

proptest! {
    /// However the prompt is chunked, whatever the sequence holds before, and whatever is drafted.
    #[test]
    fn answers_are_what_the_definition_says(
        prompt in prop::collection::vec(0..N_VOCAB, 1..30),
        held in prop::collection::vec(0..N_VOCAB, 0..30),
        n_same in 0usize..40,
        n_room in 1usize..60,
        max_tokens in prop_oneof![0usize..40, Just(usize::MAX)],
        stop_ids in prop::collection::vec(0..N_VOCAB, 0..2),
        speculate in prop::option::of(1usize..9),
        logprobs in prop::option::of(0usize..4),
        temperature in prop_oneof![Just(0.0f32), Just(0.7)],
        repeat_penalty in prop_oneof![Just(1.0f32), Just(1.3)],
        cuts in prop::collection::vec(1usize..12, 1..8),
        seed in 0u64..100,
    ) {
        let mut held = held;
        let n_same = n_same.min(prompt.len()).min(held.len());
        held[..n_same].copy_from_slice(&prompt[..n_same]);
        let config = SamplerConfig { temperature, repeat_penalty, seed, ..SamplerConfig::default() };
        let request = Request {
            max_tokens,
            stop_ids,
            speculate,
            logprobs,
            ..Request::new(prompt, sampler(config))
        };
        let ctx_len = request.prompt.len() + n_room;
        let (expected, reason) = by_definition(&request, ctx_len);
        let n_prompt = request.prompt.len();
        let mut generator = Generator::new(request, &held, ctx_len).unwrap();
        let (mut ids, mut ended) = (Vec::new(), None);
        let mut cuts = cuts.into_iter().cycle();
        while compute(&mut held, &mut generator, cuts.next().unwrap()) {
            while let Some(event) = generator.next_event() {
                match event {
                    Event::Token(token) => {
                        let wanted = logprobs.map(|n| {
                            Logprobs::new(&model(&[&generator.tokens()[..n_prompt], &ids[..]].concat()), token.id, n)
                        });
                        prop_assert_eq!(token.logprobs, wanted);
                        ids.push(token.id);
                    }
                    Event::Ended { reason, .. } => ended = Some(reason),
                    event => prop_assert!(false, "{event:?}"),
                }
            }
        }
        prop_assert_eq!(&ids, &expected);
        prop_assert_eq!(ended, Some(reason));
        prop_assert_eq!(generator.answer(), expected);
        prop_assert!(generator.is_over());
        let stats = generator.stats();
        prop_assert_eq!(stats.stop, ended);
        prop_assert_eq!(stats.n_generated, ids.len());
        prop_assert_eq!(stats.n_reused + stats.n_prefilled, n_prompt);
        prop_assert_eq!(generator.n_held(), n_prompt + stats.n_decoded);
        // The last token is computed only if what follows it was needed.
        let n_computed = match reason {
            StopReason::StopToken => ids.len(),
            _ => ids.len().saturating_sub(1),
        };
        prop_assert_eq!(stats.n_decoded, n_computed);
        prop_assert!(stats.n_accepted <= stats.n_drafted && stats.n_drafted <= 9 * (ids.len() + 1));
    }
}

/// A greedy generator after `prompt`.
fn greedy(prompt: &[u32]) -> Generator {
    let request = Request::new(prompt.to_vec(), sampler(SamplerConfig::default()));
    Generator::new(request, &[], 100).unwrap()
}

#[test]
fn wants_say_what_they_need() {
    let mut generator = greedy(&[1, 2, 3, 4, 5]);
    let wanted = generator.wanted(2).unwrap();
    assert_eq!((wanted.keep, wanted.ids), (0, &[1, 2][..]));
    assert_eq!(wanted.logits, Logits::None);
    // Asked again, with more room.
    assert_eq!(generator.wanted(3).unwrap().ids, [1, 2, 3]);
    generator.give(Given::Nothing);
    assert_eq!(generator.n_prompt_left(), 2);
    let wanted = generator.wanted(9).unwrap();
    assert_eq!((wanted.keep, wanted.ids), (3, &[4, 5][..]));
    assert_eq!(wanted.logits, Logits::Top(1));
    assert_eq!(wanted.draw.unwrap().n_left, usize::MAX);
    generator.give(Given::Logits(vec![0.0, 1.0]));
    // There are events first.
    assert!(generator.wanted(9).is_none() && !generator.is_over());
    assert!(matches!(
        generator.next_event(),
        Some(Event::Token(Token { id: 1, .. }))
    ));
    assert!(generator.next_event().is_none());
    let wanted = generator.wanted(9).unwrap();
    assert_eq!((wanted.keep, wanted.ids), (5, &[1][..]));
    assert_eq!(wanted.draw.unwrap().n_left, usize::MAX - 1);
    // A token sampled elsewhere: by a device, or by a sampler of the caller's own.
    generator.give(Given::Token(6.into()));
    assert!(matches!(
        generator.next_event(),
        Some(Event::Token(Token { id: 6, .. }))
    ));
    assert_eq!(generator.answer(), [1, 6]);
    // Log-probabilities need all logits, unless whoever samples gives them, too.
    let request = Request {
        logprobs: Some(0),
        ..Request::new(vec![1], sampler(SamplerConfig::default()))
    };
    let mut generator = Generator::new(request, &[], 100).unwrap();
    assert_eq!(generator.wanted(9).unwrap().logits, Logits::Last);
    generator.give(Given::Logits(vec![0.0, 1.0]));
    assert!(generator.next_event().is_some() && generator.next_event().is_none());
    let wanted = generator.wanted(9).unwrap();
    assert_eq!(wanted.logits, Logits::Last);
    assert_eq!(wanted.draw.unwrap().sampling.logprobs, Some(0));
    let logprobs = Logprobs {
        chosen: -0.5,
        top: Vec::new(),
    };
    generator.give(Given::Token(Chosen {
        id: 1,
        logprobs: Some(logprobs.clone()),
    }));
    let Some(Event::Token(token)) = generator.next_event() else {
        panic!("no token");
    };
    assert_eq!((token.id, token.logprobs), (1, Some(logprobs)));
}

#[test]
fn drafts_that_nobody_asked_for_stay_unsaid() {
    // A repetitive text, drafted eight tokens at a time.
    let prompt: Vec<u32> = [1, 2, 3].repeat(9);
    let request = Request {
        speculate: Some(8),
        ..Request::new(prompt.clone(), sampler(SamplerConfig::default()))
    };
    let mut generator = Generator::new(request, &prompt, 100).unwrap();
    let next = |last: u32| {
        (0..4)
            .map(|id| f32::from(id as u32 == last % 3 + 1))
            .collect::<Vec<f32>>()
    };
    // It takes a few accepted drafts until many are drafted.
    let rows = loop {
        let wanted = generator.wanted(99).unwrap();
        let rows: Vec<f32> = match wanted.logits {
            Logits::All => wanted.ids.iter().flat_map(|&id| next(id)).collect(),
            _ => next(wanted.ids[wanted.ids.len() - 1]),
        };
        if wanted.ids.len() > 4 {
            break rows;
        }
        generator.give(Given::Logits(rows));
        while generator.next_event().is_some() {}
    };
    let n_drafts = rows.len() / 4 - 1;
    let before = *generator.stats();
    assert_eq!(generator.n_held(), prompt.len() + before.n_decoded);
    generator.give(Given::Logits(rows));
    let mut taken = |n: usize| {
        for _ in 0..n {
            assert!(matches!(generator.next_event(), Some(Event::Token(_))));
        }
        let stats = generator.stats();
        assert_eq!(generator.n_held(), prompt.len() + stats.n_decoded);
        [
            stats.n_generated - before.n_generated,
            stats.n_decoded - before.n_decoded,
            stats.n_accepted - before.n_accepted,
        ]
    };
    assert_eq!(taken(1), [1, 1, 0]);
    assert_eq!(taken(2), [3, 3, 2]);
    assert_eq!(taken(n_drafts - 2), [n_drafts + 1, n_drafts + 1, n_drafts]);
    // All are used up.
    assert!(generator.next_event().is_none() && generator.wanted(99).is_some());
}

#[test]
fn what_is_no_answer_fails() {
    let failure = |generator: &mut Generator, given| {
        generator.wanted(99).unwrap();
        generator.give(given);
        let Some(Event::Failed(error)) = generator.next_event() else {
            panic!("expected a failure");
        };
        assert!(generator.is_over() && generator.next_event().is_none());
        assert!(generator.wanted(99).is_none());
        assert_eq!(generator.stats().stop, None);
        // And nothing follows.
        generator.give(Given::Token(1.into()));
        assert!(generator.next_event().is_none());
        error
    };
    let damaged = vec![f32::NAN, f32::INFINITY];
    let error = failure(&mut greedy(&[1, 2]), Given::Logits(damaged.clone()));
    assert_eq!(error.code(), ErrorCode::Compute);
    assert_eq!(
        format!("{error:#}"),
        "computing the prompt: after token 2: expected logits, found none that is finite: the weights are \
         damaged, or not what the files say"
    );
    let mut generator = greedy(&[1, 2]);
    generator.wanted(99).unwrap();
    generator.give(Given::Logits(vec![0.0, 1.0]));
    assert!(generator.next_event().is_some() && generator.next_event().is_none());
    let error = failure(&mut generator, Given::Logits(damaged));
    assert!(
        error
            .to_string()
            .starts_with("after token 3: expected logits"),
        "{error}"
    );
    for given in [Given::Nothing, Given::Logits(Vec::new())] {
        let error = failure(&mut greedy(&[1, 2]), given);
        assert_eq!(error.code(), ErrorCode::InvalidRequest);
    }
    // Given twice.
    let mut generator = greedy(&[1]);
    generator.wanted(99).unwrap();
    generator.give(Given::Token(1.into()));
    generator.give(Given::Token(1.into()));
    assert!(matches!(generator.next_event(), Some(Event::Failed(_))));
}

#[test]
fn prompts_must_fit() {
    let new = |n: usize, ctx_len| {
        let request = Request::new(vec![1; n], sampler(SamplerConfig::default()));
        Generator::new(request, &[], ctx_len).map(|_| ())
    };
    let error = new(0, 9).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidRequest);
    assert_eq!(
        error.to_string(),
        "the prompt has no tokens: expected at least one"
    );
    let error = new(9, 9).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ContextFull);
    assert_eq!(
        error.to_string(),
        "the prompt has 9 tokens, but the context holds 9"
    );
    new(8, 9).unwrap();
}
