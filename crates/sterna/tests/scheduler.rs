//! Answers in shared steps are what they are alone.

use std::sync::Arc;

use crate::common::{self, Files, cpu, one, sampled, session};
use proptest::prelude::*;
use sterna::ErrorCode;
use sterna::generate::{Event, Generator, Logprobs, Request, StopReason, TextOptions};
use sterna::scheduler::{Scheduler, SchedulerOptions, SequenceId};
use sterna::sequence::Sequence;
use sterna_engine::lora::{
    ActiveAdapter, AdapterOptions, AdapterSource, LoraMatrix, LoraPair, Module, Orientation,
};
use sterna_engine::{Backend, Cpu, Logits, Model, Sampler, SamplerConfig};
use sterna_format::DType;

/// All that a caller sees of an answer, but for its time and its drafts.
#[derive(Debug, PartialEq)]
struct Told {
    text: String,
    ids: Vec<u32>,
    logprobs: Vec<Option<Logprobs>>,
    stop: Option<StopReason>,
    stop_id: Option<u32>,
    /// Tokens in the prompt, reused, computed of it, generated, and computed again.
    counts: [usize; 5],
    /// What the sequence holds then.
    held: Vec<u32>,
}

/// What was told of an answer so far.
#[derive(Debug, Default)]
struct Telling {
    text: String,
    logprobs: Vec<Option<Logprobs>>,
    ids: Vec<u32>,
}

impl Telling {
    fn hear(&mut self, event: Event) {
        match event {
            Event::Token(token) => {
                self.text += &token.text;
                self.ids.push(token.id);
                self.logprobs.push(token.logprobs);
            }
            Event::Ended { text, .. } => self.text += &text,
            event => panic!("{event:?}"),
        }
    }

    fn told<B: Backend>(self, scheduler: &mut Scheduler<B>, id: SequenceId) -> Told {
        let generator = scheduler.finish(id).unwrap();
        let stats = generator.stats();
        assert_eq!(generator.answer(), self.ids);
        let sequence = scheduler.sequence(id).unwrap();
        assert_eq!(sequence.len(), sequence.session().len());
        assert_eq!(
            sequence.len(),
            stats.n_reused + stats.n_prefilled + stats.n_decoded
        );
        Told {
            text: self.text,
            ids: self.ids,
            logprobs: self.logprobs,
            stop: stats.stop,
            stop_id: generator.stop_id(),
            counts: [
                stats.n_prompt,
                stats.n_reused,
                stats.n_prefilled,
                stats.n_generated,
                stats.n_decoded,
            ],
            held: sequence.ids().to_vec(),
        }
    }
}

/// The answers to `requests`, one after the other, by a sequence that is alone.
fn alone<B: Backend>(
    model: &Arc<Model<B>>,
    ctx_len: usize,
    requests: &[Request],
    options: SchedulerOptions,
) -> Vec<Told> {
    let (mut scheduler, id) = one(model, ctx_len, options);
    let answer = |request: &Request| {
        scheduler.start(id, request.clone()).unwrap();
        let mut telling = Telling::default();
        while !scheduler.is_idle() {
            for (_, event) in scheduler.step().unwrap() {
                telling.hear(event);
            }
        }
        telling.told(&mut scheduler, id)
    };
    requests.iter().map(answer).collect()
}

/// A sequence's requests, one after the other, and when it joins.
#[derive(Debug, Clone)]
struct Guest {
    requests: Vec<Request>,
    /// The step before which it joins.
    joins: usize,
    /// Tokens after which its last answer is broken off.
    leaves_after: Option<usize>,
}

/// The answers to what `guests` ask, in shared steps.
fn together<B: Backend>(
    model: &Arc<Model<B>>,
    ctx_len: usize,
    guests: &[Guest],
    options: SchedulerOptions,
) -> Vec<Vec<Told>> {
    struct Seat<'a> {
        id: SequenceId,
        guest: &'a Guest,
        telling: Telling,
        told: Vec<Told>,
    }
    let mut scheduler = Scheduler::new(options);
    let mut seats: Vec<Option<Seat<'_>>> = guests.iter().map(|_| None).collect();
    for step in 0.. {
        for (seat, guest) in seats.iter_mut().zip(guests) {
            if seat.is_none() && guest.joins <= step {
                let id = scheduler.add(Sequence::new(session(model, ctx_len)));
                scheduler.start(id, guest.requests[0].clone()).unwrap();
                *seat = Some(Seat {
                    id,
                    guest,
                    telling: Telling::default(),
                    told: Vec::new(),
                });
            }
        }
        for (id, event) in scheduler.step().unwrap() {
            let mut seats = seats.iter_mut().flatten();
            let seat = seats.find(|seat| seat.id == id).unwrap();
            seat.telling.hear(event);
        }
        let mut is_done = true;
        for seat in &mut seats {
            let Some(seat) = seat else {
                is_done = false;
                continue;
            };
            let Guest {
                requests,
                leaves_after,
                ..
            } = seat.guest;
            let n_told = seat.told.len();
            if n_told == requests.len() {
                continue;
            }
            is_done = false;
            let is_last = n_told + 1 == requests.len();
            let leaves = is_last && leaves_after.is_some_and(|n| seat.telling.ids.len() >= n);
            if leaves || scheduler.generator(seat.id).is_some_and(Generator::is_over) {
                let told = std::mem::take(&mut seat.telling).told(&mut scheduler, seat.id);
                seat.told.push(told);
                match requests.get(n_told + 1) {
                    Some(request) => scheduler.start(seat.id, request.clone()).unwrap(),
                    None => {
                        let sequence = scheduler.remove(seat.id).unwrap();
                        assert_eq!(sequence.ids(), seat.told[n_told].held);
                    }
                }
            }
        }
        if is_done {
            break;
        }
    }
    assert!(scheduler.ids().next().is_none());
    seats.into_iter().flatten().map(|seat| seat.told).collect()
}

/// Fails unless `found` is `expected`, or was broken off before its end.
fn compare(found: &Told, expected: &Told, was_left: bool) {
    if !was_left || found.stop.is_some() {
        assert_eq!(found, expected);
        return;
    }
    let n = found.ids.len();
    assert_eq!(found.ids, expected.ids[..n]);
    assert_eq!(found.logprobs, expected.logprobs[..n]);
    assert!(expected.text.starts_with(&found.text));
    // A draft that was right may be computed already.
    assert!(
        expected
            .held
            .starts_with(&found.held[..found.held.len().min(expected.held.len())])
    );
}

const TEXTS: [&str; 6] = [
    "Once upon a time",
    "Lily said: no no no no no no no",
    "One day, a fox and a cat sat. One day, a fox and a cat sat. One day, a fox",
    "The",
    "Tim had a big red ball. He liked to play with the ball in the park with his friends. The ball was \
     round. One day, Tim",
    "She was so happy that she",
];

const STOPS: [&str; 4] = ["no such text", ".", "the", "\n"];

/// How a text is continued.
#[derive(Debug, Clone)]
struct Ask {
    text: usize,
    stop: usize,
    max_tokens: usize,
    speculate: Option<usize>,
    logprobs: Option<usize>,
    sampling: SamplerConfig,
}

impl Ask {
    fn request(&self, files: &Files) -> Request {
        let n_vocab = files.plan.config().n_vocab;
        Request {
            max_tokens: self.max_tokens,
            stop_ids: files.tokenizer.end_ids().to_vec(),
            speculate: self.speculate,
            logprobs: self.logprobs,
            text: Some(TextOptions {
                tokenizer: files.tokenizer.clone(),
                stop_strings: vec![STOPS[self.stop].to_owned()],
            }),
            ..Request::new(
                files.encode(TEXTS[self.text]),
                Sampler::new(self.sampling.clone(), n_vocab).unwrap(),
            )
        }
    }
}

fn sampling() -> impl Strategy<Value = SamplerConfig> {
    let penalised = SamplerConfig {
        repeat_penalty: 1.3,
        ..SamplerConfig::default()
    };
    prop_oneof![
        Just(SamplerConfig::default()),
        Just(penalised),
        (0..9u64).prop_map(sampled),
    ]
}

prop_compose! {
    fn ask()(
        text in 0..TEXTS.len(),
        stop in 0..STOPS.len(),
        max_tokens in 0usize..24,
        speculate in prop::option::of(1usize..9),
        logprobs in prop::option::weighted(0.2, 0usize..4),
        sampling in sampling(),
    ) -> Ask {
        Ask { text, stop, max_tokens, speculate, logprobs, sampling }
    }
}

type Visit = (Vec<Ask>, usize, Option<usize>);

fn visit() -> impl Strategy<Value = Visit> {
    let asks = prop::collection::vec(ask(), 1..3);
    (asks, 0usize..30, prop::option::weighted(0.2, 0usize..12))
}

fn guests(files: &Files, visits: &[Visit]) -> Vec<Guest> {
    let guest = |(asks, joins, leaves_after): &Visit| Guest {
        requests: asks.iter().map(|ask| ask.request(files)).collect(),
        joins: *joins,
        leaves_after: *leaves_after,
    };
    visits.iter().map(guest).collect()
}

/// Fails unless each of `guests` is told in shared steps what it is told alone.
fn check<B: Backend>(
    model: &Arc<Model<B>>,
    ctx_len: usize,
    guests: &[Guest],
    options: SchedulerOptions,
) -> Vec<Vec<Told>> {
    let found = together(model, ctx_len, guests, options);
    let alone = |guest: &Guest| alone(model, ctx_len, &guest.requests, SchedulerOptions::default());
    let expected: Vec<Vec<Told>> = guests.iter().map(alone).collect();
    assert_eq!(found.len(), expected.len());
    for ((found, expected), guest) in found.iter().zip(&expected).zip(guests) {
        assert_eq!(found.len(), expected.len());
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let was_left = i + 1 == guest.requests.len() && guest.leaves_after.is_some();
            compare(found, expected, was_left);
        }
    }
    expected
}

#[test]
fn answers_do_not_depend_on_what_shares_their_steps() {
    let files = Files::stories();
    let model = files.load(cpu());
    let test = |(visits, chunk, max_rows, ctx_len): (Vec<Visit>, usize, usize, usize)| {
        let options = SchedulerOptions {
            chunk,
            max_rows,
            ..SchedulerOptions::default()
        };
        check(&model, ctx_len, &guests(&files, &visits), options);
        Ok(())
    };
    let cases = (
        prop::collection::vec(visit(), 1..6),
        prop_oneof![Just(64), 1usize..20],
        prop_oneof![Just(512), 1usize..12],
        // The longest text has 60 tokens or so.
        prop_oneof![Just(256), 80usize..100],
    );
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(48));
    runner.run(&cases, test).unwrap();
}

/// Five visits, some of which join others in the midst of an answer.
fn fixed_visits() -> Vec<Visit> {
    let ask = |text, stop, max_tokens, sampling| Ask {
        text,
        stop,
        max_tokens,
        speculate: None,
        logprobs: None,
        sampling,
    };
    let greedy = SamplerConfig::default();
    let drafting = Ask {
        speculate: Some(8),
        ..ask(2, 0, 24, greedy.clone())
    };
    vec![
        (
            vec![ask(0, 0, 24, greedy.clone()), ask(3, 1, 24, sampled(1))],
            0,
            None,
        ),
        (vec![ask(4, 0, 16, sampled(2)), drafting], 0, None),
        (vec![ask(1, 3, 30, greedy.clone())], 3, Some(7)),
        (vec![ask(5, 1, 30, greedy.clone())], 9, None),
        (
            vec![ask(2, 0, 20, sampled(3)), ask(0, 2, 9, greedy)],
            12,
            None,
        ),
    ]
}

#[test]
fn the_built_in_model_tells_several_tales_at_once() {
    let files = Files::tiny_tales();
    let model = files.load(cpu());
    let guests = guests(&files, &fixed_visits());
    for max_rows in [512, 6] {
        let options = SchedulerOptions {
            max_rows,
            ..SchedulerOptions::default()
        };
        let told = check(&model, 200, &guests, options);
        assert!(told.iter().flatten().all(|told| !told.ids.is_empty()));
    }
}

/// The best token, and draws of the host.
#[test]
#[cfg(feature = "gpu")]
fn a_gpu_tells_several_tales_at_once() {
    let Some(gpu) = common::gpu() else { return };
    let files = Files::tiny_tales();
    let model = files.load(gpu);
    // A software driver takes its time.
    let guests = guests(&files, &fixed_visits()[..3]);
    check(&model, 200, &guests, SchedulerOptions::gpu());
}

/// An adapter that makes every number infinite.
fn ruin(model: &Arc<Model<Cpu>>) -> ActiveAdapter<Cpu> {
    let config = model.config();
    let matrix = |rows: usize, columns: usize| LoraMatrix {
        name: "matrix".into(),
        shape: vec![rows, columns],
        dtype: DType::F32,
        bytes: f32::MAX.to_le_bytes().repeat(rows * columns).into(),
    };
    let pair = LoraPair {
        layer: 0,
        module: Module::Down,
        scaling: 1.0,
        a: matrix(4, config.ffn_dim),
        b: matrix(config.model_dim, 4),
    };
    let source = AdapterSource {
        name: "ruin".into(),
        orientation: Orientation::RankFirst,
        pairs: vec![pair],
    };
    ActiveAdapter {
        adapter: model
            .load_adapter(source, AdapterOptions::default())
            .unwrap(),
        scale: 1.0,
    }
}

/// Answers three requests in shared steps, of which the second's sequence is spoiled after four tokens; returns
/// how that failed. The others are answered as they are alone.
fn spoiled(spoil: impl Fn(&Arc<Model<Cpu>>, &mut Sequence<Cpu>)) -> sterna::Error {
    let files = Files::stories();
    let model = files.load(cpu());
    let requests: Vec<Request> = fixed_visits()[..3]
        .iter()
        .map(|visit| visit.0[0].request(&files))
        .collect();
    let mut scheduler = Scheduler::new(SchedulerOptions::default());
    let ids: Vec<SequenceId> = requests
        .iter()
        .map(|request| {
            let id = scheduler.add(Sequence::new(session(&model, 200)));
            scheduler.start(id, request.clone()).unwrap();
            id
        })
        .collect();
    let mut tellings: Vec<Telling> = ids.iter().map(|_| Telling::default()).collect();
    let mut failure = None;
    while !scheduler.is_idle() {
        if tellings[1].ids.len() == 4 && failure.is_none() {
            spoil(&model, scheduler.sequence_mut(ids[1]).unwrap());
        }
        for (id, event) in scheduler.step().unwrap() {
            match event {
                Event::Failed(error) => {
                    assert!(id == ids[1] && failure.is_none());
                    failure = Some(error);
                }
                event => tellings[id_index(&ids, id)].hear(event),
            }
        }
    }
    for (i, telling) in tellings.into_iter().enumerate() {
        let expected = alone(
            &model,
            200,
            &requests[i..][..1],
            SchedulerOptions::default(),
        );
        if i == 1 {
            assert_eq!(telling.ids, expected[0].ids[..4]);
        } else {
            assert_eq!(telling.told(&mut scheduler, ids[i]), expected[0]);
        }
    }
    failure.unwrap()
}

#[test]
fn an_answer_that_fails_takes_no_other_along() {
    let failure = spoiled(|model, sequence| sequence.set_adapters(vec![ruin(model)]).unwrap());
    assert_eq!(failure.code(), ErrorCode::Compute);
    assert!(
        failure.to_string().contains("none that is finite"),
        "{failure}"
    );
}

#[test]
fn a_step_that_fails_for_one_is_computed_for_the_others() {
    // What has to be computed again doesn't fit.
    let shrink = |model: &Arc<Model<Cpu>>, sequence: &mut Sequence<Cpu>| {
        *sequence = Sequence::new(session(model, 2));
    };
    assert_eq!(spoiled(shrink).code(), ErrorCode::ContextFull);
    // It is the answer that fails if there is no other, too.
    let files = Files::stories();
    let model = files.load(cpu());
    let (mut scheduler, id) = one(&model, 200, SchedulerOptions::default());
    let request = fixed_visits()[0].0[0].request(&files);
    scheduler.start(id, request).unwrap();
    shrink(&model, scheduler.sequence_mut(id).unwrap());
    let events = scheduler.step().unwrap();
    let [(_, Event::Failed(error))] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(error.code(), ErrorCode::ContextFull);
    assert!(scheduler.is_idle());
}

fn id_index(ids: &[SequenceId], id: SequenceId) -> usize {
    ids.iter().position(|own| *own == id).unwrap()
}

/// Prompts of some lengths, beside an answer that is being decoded: after how many steps each has its first token. With
/// `crowd`, there is always another prompt of eight tokens.
fn first_tokens(lengths: &[usize], crowd: bool) -> Vec<usize> {
    let model = Files::stories().load(cpu());
    let options = SchedulerOptions {
        chunk: 16,
        chunk_beside: 4,
        ..SchedulerOptions::default()
    };
    let mut scheduler = Scheduler::new(options);
    let start = |scheduler: &mut Scheduler<Cpu>, n: usize, max_tokens: usize| {
        let prompt = (0..n).map(|i| 3 + i as u32 * 37 % 380).collect();
        let request = Request {
            max_tokens,
            ..Request::new(prompt, Sampler::new(SamplerConfig::default(), 512).unwrap())
        };
        let id = scheduler.add(Sequence::new(session(&model, 400)));
        scheduler.start(id, request).unwrap();
        id
    };
    let decoded = start(&mut scheduler, 1, 300);
    scheduler.step().unwrap();
    let ids: Vec<SequenceId> = (lengths.iter())
        .map(|&n| start(&mut scheduler, n, 1))
        .collect();
    let mut first = vec![0; ids.len()];
    for n in 1..200 {
        if crowd {
            start(&mut scheduler, 8, 1);
        }
        let stepped = scheduler.step().unwrap();
        let speaks = |id: SequenceId| stepped.iter().any(|(of, _)| *of == id);
        assert!(speaks(decoded), "{n}");
        for (first, id) in first.iter_mut().zip(&ids) {
            if *first == 0 && speaks(*id) {
                *first = n;
            }
        }
        if !first.contains(&0) {
            return first;
        }
    }
    panic!("{first:?}");
}

#[test]
fn answers_wait_for_few_tokens_of_prompts_and_short_prompts_come_first() {
    // Four tokens for each prompt that waits: twelve in the first step, eight in two, then four.
    assert_eq!(first_tokens(&[40, 8, 20], false), [13, 1, 3]);
    // No more than a chunk: sixteen in three steps, and then as above.
    assert_eq!(
        first_tokens(&[16, 15, 15, 15, 10, 9, 8], false),
        [9, 3, 4, 6, 2, 2, 1]
    );
    // The long one isn't passed over for ever: a step in nine is its own, until it is as short as the others.
    assert!(first_tokens(&[24], true)[0] <= 27);
}

/// A short prompt that comes while a long one is computed has its token after the next step, which has nothing of the long one.
#[test]
fn a_short_prompt_hardly_waits_for_a_long_one() {
    let files = Files::stories();
    let model = files.load(cpu());
    let options = SchedulerOptions {
        chunk: 32,
        max_rows: 40,
        ..SchedulerOptions::default()
    };
    let mut scheduler = Scheduler::new(options);
    let start = |scheduler: &mut Scheduler<Cpu>, n: usize| {
        let sampler = Sampler::new(SamplerConfig::default(), 512).unwrap();
        let request = Request {
            max_tokens: 1,
            ..Request::new((0..n).map(|i| 3 + i as u32 * 37 % 380).collect(), sampler)
        };
        let id = scheduler.add(Sequence::new(session(&model, 200)));
        scheduler.start(id, request).unwrap();
        id
    };
    let long = start(&mut scheduler, 150);
    let n_done = |scheduler: &Scheduler<Cpu>| scheduler.sequence(long).unwrap().len();
    scheduler.step().unwrap();
    assert_eq!(n_done(&scheduler), 32);
    // One of more than a quarter of a chunk is like others; and so is the third in a row.
    for (n, rows) in [(8, 0), (9, 31), (8, 0), (8, 0), (8, 32)] {
        let before = n_done(&scheduler);
        let other = start(&mut scheduler, n);
        let stepped = scheduler.step().unwrap();
        assert!(stepped.iter().any(|(id, _)| *id == other));
        assert_eq!(n_done(&scheduler) - before, rows, "beside {n}");
        scheduler.remove(other);
    }
}

#[test]
fn sequences_of_two_models_take_turns() {
    let files = Files::stories();
    let models = [files.load(cpu()), files.load(cpu())];
    let request = fixed_visits()[0].0[0].request(&files);
    let mut scheduler = Scheduler::new(SchedulerOptions::default());
    let seats: Vec<(SequenceId, &Arc<Model<Cpu>>)> = (0..4)
        .map(|i| {
            let model = &models[i % 2];
            let id = scheduler.add(Sequence::new(session(model, 200)));
            scheduler.start(id, request.clone()).unwrap();
            (id, model)
        })
        .collect();
    while !scheduler.is_idle() {
        let stepped = scheduler.step().unwrap();
        let of = |id| seats.iter().find(|seat| seat.0 == id).unwrap().1;
        assert!(
            stepped
                .windows(2)
                .all(|pair| Arc::ptr_eq(of(pair[0].0), of(pair[1].0)))
        );
    }
    let expected = alone(&models[0], 200, &[request], SchedulerOptions::default());
    for (id, _) in seats {
        assert_eq!(scheduler.finish(id).unwrap().answer(), expected[0].ids);
    }
}

/// One model has an answer that goes on and on, the other a prompt: that waits for no more than a step in two.
#[test]
fn a_prompt_does_not_wait_for_the_answers_of_another_model() {
    let files = Files::stories();
    let models = [files.load(cpu()), files.load(cpu())];
    let options = SchedulerOptions {
        chunk: 8,
        ..SchedulerOptions::default()
    };
    let mut scheduler = Scheduler::new(options);
    let start = |scheduler: &mut Scheduler<Cpu>, model: usize, n: usize, max_tokens| {
        let sampler = Sampler::new(SamplerConfig::default(), 512).unwrap();
        let request = Request {
            max_tokens,
            ..Request::new((0..n).map(|i| 3 + i as u32 * 37 % 380).collect(), sampler)
        };
        let id = scheduler.add(Sequence::new(session(&models[model], 200)));
        scheduler.start(id, request).unwrap();
        id
    };
    let endless = start(&mut scheduler, 0, 1, 150);
    for _ in 0..3 {
        scheduler.step().unwrap();
    }
    let prompt = start(&mut scheduler, 1, 20, 1);
    let mut speakers = Vec::new();
    while !speakers.contains(&prompt) {
        assert!(speakers.len() < 10, "{speakers:?}");
        speakers.extend(scheduler.step().unwrap().iter().map(|(id, _)| *id));
        // Others of that model, which have just come, don't take its turns.
        start(&mut scheduler, 1, 30, 1);
    }
    // Three steps for the prompt, the first at once, and one between each two.
    let n_between = speakers.iter().filter(|id| **id == endless).count();
    assert_eq!(n_between, 2, "{speakers:?}");
}

/// What of a prompt is reused goes back to a checkpoint; the answers are those of fresh sequences, and what is
/// said to be reused is.
#[test]
fn answers_of_a_model_with_states_do_not_depend_on_what_was_before() {
    let model = common::stateful();
    let long: Vec<u32> = (0..150).map(|i| 3 + i * 37 % 380).collect();
    let request = |prompt: &[u32]| Request {
        max_tokens: 20,
        speculate: Some(4),
        text: None,
        ..Request::new(prompt.to_vec(), Sampler::new(sampled(5), 384).unwrap())
    };
    let (mut scheduler, id) = one(&model, 400, SchedulerOptions::default());
    let mut spoken = long[..40].to_vec();
    let mut n_reused = Vec::new();
    for turn in 0..4 {
        scheduler.start(id, request(&spoken)).unwrap();
        while !scheduler.is_idle() {
            scheduler.step().unwrap();
        }
        let answer = scheduler.finish(id).unwrap();
        let expected = alone(
            &model,
            400,
            &[request(&spoken)],
            SchedulerOptions::default(),
        );
        assert_eq!(answer.answer(), expected[0].ids, "turn {turn}");
        let stats = answer.stats();
        assert_eq!(stats.n_reused + stats.n_prefilled, stats.n_prompt);
        n_reused.push(stats.n_reused);
        spoken.extend_from_slice(answer.answer());
        spoken.extend_from_slice(&long[turn * 10..turn * 10 + 5]);
        if turn == 2 {
            // Another ending: far back, where there is no checkpoint.
            spoken.truncate(30);
            spoken.push(7);
        }
    }
    assert!(
        n_reused[1] >= 40 && n_reused[2] > n_reused[1],
        "{n_reused:?}"
    );
    assert!(n_reused[3] < 30, "{n_reused:?}");
}

/// One model is on the CPU, whose results are there at once, the other on a GPU, whose are waited for.
#[test]
#[cfg(feature = "gpu")]
fn the_device_is_waited_for_whose_turn_it_is() {
    use sterna_engine::hybrid::OffloadPlan;
    use sterna_engine::{Hybrid, SessionOptions};

    let Some(gpu) = common::gpu() else { return };
    let files = Files::tiny_tales();
    let share = OffloadPlan::new(&files.plan, &SessionOptions::new(200), &gpu);
    let models = [
        files.load(Hybrid::cpu(cpu())),
        files.load(Hybrid::split(gpu, cpu(), share)),
    ];
    let request = fixed_visits()[0].0[0].request(&files);
    let mut scheduler = Scheduler::new(SchedulerOptions::default());
    let ids = (models.each_ref()).map(|model| scheduler.add(Sequence::new(session(model, 200))));
    // The second decodes when the first has yet to read its prompt.
    scheduler.start(ids[1], request.clone()).unwrap();
    while scheduler.generator(ids[1]).unwrap().answer().is_empty() {
        scheduler.step().unwrap();
    }
    scheduler.start(ids[0], request).unwrap();
    assert!(!scheduler.generator(ids[1]).unwrap().is_over());
    while !scheduler.is_idle() {
        scheduler.step().unwrap();
    }
    for id in ids {
        assert!(scheduler.finish(id).unwrap().answer().len() > 1);
    }
}

#[test]
fn what_cannot_be_answered_is_refused_and_the_sequence_stays() {
    let files = Files::stories();
    let model = files.load(cpu());
    let n_vocab = model.config().n_vocab;
    let (mut scheduler, id) = one(&model, 20, SchedulerOptions::default());
    let greedy = || Sampler::new(SamplerConfig::default(), n_vocab).unwrap();
    let request = |prompt: Vec<u32>| Request {
        max_tokens: 3,
        ..Request::new(prompt, greedy())
    };
    scheduler.start(id, request(vec![1, 2, 3])).unwrap();
    while !scheduler.is_idle() {
        scheduler.step().unwrap();
    }
    assert_eq!(scheduler.finish(id).unwrap().answer().len(), 3);
    let held = scheduler.sequence(id).unwrap().ids().to_vec();
    assert_eq!(held.len(), 5);
    for (prompt, code, message) in [
        (vec![], ErrorCode::InvalidRequest, "no tokens"),
        (vec![1; 20], ErrorCode::ContextFull, "the context holds 20"),
        (
            vec![1, n_vocab as u32],
            ErrorCode::InvalidRequest,
            "computing the prompt: token id 512 at index 1: the model has 512 tokens",
        ),
    ] {
        let error = scheduler.start(id, request(prompt)).unwrap_err();
        assert_eq!(error.code(), code);
        assert!(format!("{error:#}").contains(message), "{error:#}");
    }
    assert!(scheduler.is_idle() && scheduler.step().unwrap().is_empty());
    assert_eq!(scheduler.sequence(id).unwrap().ids(), held);
    // What is cut off a sequence behind an answer's back is computed again.
    scheduler.start(id, request(held.clone())).unwrap();
    scheduler.step().unwrap();
    scheduler.sequence_mut(id).unwrap().truncate(2);
    while !scheduler.is_idle() {
        scheduler.step().unwrap();
    }
    let found = scheduler.finish(id).unwrap();
    let expected = alone(&model, 20, &[request(held)], SchedulerOptions::default());
    assert_eq!(found.answer(), expected[0].ids);
    let sequence = scheduler.remove(id).unwrap();
    assert!(scheduler.start(id, request(vec![1])).is_err());
    assert!(scheduler.finish(id).is_none() && scheduler.remove(id).is_none());
    assert_eq!(sequence.ids(), expected[0].held);
}

/// Log-probabilities against a log-softmax of the logits that a session gives.
#[test]
fn logprobs_are_those_of_the_logits() {
    let files = Files::stories();
    let model = files.load(cpu());
    for speculate in [None, Some(8)] {
        let ask = Ask {
            text: 2,
            stop: 0,
            max_tokens: 20,
            speculate,
            logprobs: Some(3),
            sampling: sampled(4),
        };
        let request = ask.request(&files);
        let told = alone(
            &model,
            200,
            std::slice::from_ref(&request),
            SchedulerOptions::default(),
        )
        .remove(0);
        let tokens = [&request.prompt[..], &told.ids].concat();
        let logits = session(&model, 200).forward(&tokens, Logits::All).unwrap();
        let n_vocab = model.config().n_vocab;
        let rows = logits.chunks_exact(n_vocab).skip(request.prompt.len() - 1);
        assert_eq!(told.logprobs.len(), 20);
        for ((row, &id), logprobs) in rows.zip(&told.ids).zip(told.logprobs) {
            let logprobs = logprobs.unwrap();
            let total: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
            let direct = |id: u32| f64::from(row[id as usize]) - total.ln();
            assert!((f64::from(logprobs.chosen) - direct(id)).abs() < 1e-5);
            assert_eq!(logprobs.top.len(), 3);
            for (i, (top, logprob)) in logprobs.top.into_iter().enumerate() {
                assert!((f64::from(logprob) - direct(top)).abs() < 1e-5);
                let n_better = (0..n_vocab as u32)
                    .filter(|&id| direct(id) > direct(top))
                    .count();
                assert_eq!(n_better, i);
            }
        }
    }
}
