//! That neither drafts, nor tokens computed in advance, nor lost devices change an answer.

use std::collections::HashSet;
use std::sync::Arc;

#[cfg(feature = "gpu")]
use crate::common;
use crate::common::{Files, cpu, sampled, session};
use sterna::generate::{Event, Generator, Given, Request, Stats, StopReason, TextOptions, Wanted};
use sterna::sequence::Sequence;
use sterna_engine::{Backend, Decoded, Model, Sampler, SamplerConfig};

/// Tokens of an answer at most.
const MAX_TOKENS: usize = 40;

/// Answers a series of prompts, one after the other, as a chat does.
struct Answering<'a, B: Backend> {
    files: &'a Files,
    sequence: Sequence<B>,
    sampler: Sampler,
    speculate: Option<usize>,
}

/// All that a caller sees of an answer, but for its time.
#[derive(Debug, PartialEq)]
struct Told {
    pieces: Vec<String>,
    ids: Vec<u32>,
    stop: Option<StopReason>,
    stats: [usize; 5],
    held: Vec<u32>,
}

impl<'a, B: Backend> Answering<'a, B> {
    /// In a context where the longest of `prompts` leaves room for `room` tokens.
    fn new(
        files: &'a Files,
        model: &Arc<Model<B>>,
        sampling: SamplerConfig,
        prompts: &[String],
        room: usize,
        speculate: Option<usize>,
    ) -> Answering<'a, B> {
        let lens = prompts.iter().map(|text| files.encode(text).len());
        let ctx_len = lens.max().unwrap() + room;
        Answering {
            files,
            sequence: Sequence::new(session(model, ctx_len)),
            sampler: Sampler::new(sampling, model.config().n_vocab).unwrap(),
            speculate,
        }
    }

    /// Computes what a generator wants.
    fn compute(sequence: &mut Sequence<B>, wanted: Wanted<'_>) -> Given {
        sequence.truncate(wanted.keep);
        let Some(draw) = wanted.draw else {
            return Given::Logits(sequence.forward(wanted.ids, wanted.logits).unwrap());
        };
        match sequence
            .decode(wanted.ids, draw.sampling, draw.n_left)
            .unwrap()
        {
            Decoded::Token(chosen) => Given::Token(chosen),
            Decoded::Logits(logits) => Given::Logits(logits),
        }
    }

    /// The answer to `prompt`, of which `n_pieces` are taken at most.
    fn answer(&mut self, prompt: &str, stop: &str, n_pieces: usize) -> (Told, Stats) {
        let request = Request {
            max_tokens: MAX_TOKENS,
            stop_ids: self.files.tokenizer.end_ids().to_vec(),
            speculate: self.speculate,
            text: Some(TextOptions {
                tokenizer: self.files.tokenizer.clone(),
                stop_strings: vec![stop.to_owned()],
            }),
            ..Request::new(self.files.encode(prompt), self.sampler.clone())
        };
        let Answering { sequence, .. } = self;
        let mut generator = Generator::new(request, sequence.ids(), sequence.ctx_len()).unwrap();
        let mut pieces = Vec::new();
        while pieces.len() < n_pieces {
            let piece = match generator.next_event() {
                Some(Event::Token(token)) => token.text,
                Some(Event::Ended { text, .. }) => text,
                Some(event) => panic!("{event:?}"),
                None => match generator.wanted(512) {
                    Some(wanted) => {
                        let given = Self::compute(sequence, wanted);
                        generator.give(given);
                        continue;
                    }
                    None => break,
                },
            };
            if !piece.is_empty() {
                pieces.push(piece);
            }
        }
        sequence.truncate(generator.n_held());
        assert_eq!(sequence.session().len(), sequence.len(), "{prompt}");
        let stats = *generator.stats();
        let told = Told {
            pieces,
            ids: generator.answer().to_vec(),
            stop: stats.stop,
            stats: [
                stats.n_prompt,
                stats.n_reused,
                stats.n_prefilled,
                stats.n_generated,
                stats.n_decoded,
            ],
            held: sequence.ids().to_vec(),
        };
        self.sampler = generator.into_sampler();
        (told, stats)
    }
}

/// 200 prompts: 25 times 8 forms, in which more or less is to be found of what the answer says.
fn prompts() -> Vec<String> {
    let heroes = ["Lily", "Max", "Ruby", "Theo", "Hazel"];
    let kinds = ["fox", "rabbit", "girl", "duck", "otter"];
    let mut prompts = Vec::new();
    for (i, hero) in heroes.into_iter().enumerate() {
        for (j, kind) in kinds.into_iter().enumerate() {
            let pal = heroes[(i + j + 1) % heroes.len()];
            let tale = format!(
                "Once upon a time, a shy {kind} named {hero} lived near the old barn. {hero} had a silver \
                 key. One day, the silver key was gone. {pal} came by and said, \"I will help you look.\" \
                 At last, they found the silver key under a bench."
            );
            let chat = |text: &str| format!("<|begin_of_text|>User: {text}<|eot_id|>Assistant:");
            prompts.extend([
                chat(&format!("Tell me a story about a {kind} named {hero}.")),
                chat(&format!("Summarize this text:\n{tale}")),
                chat(&format!("{tale}\n\nQuestion: What did {hero} lose?")),
                chat(&format!("What is {i} plus {j}?")),
                // What is said a second time may go on as it did the first time.
                format!("{tale} {}", &tale[..40 + 9 * i + j]),
                format!("The {kind} sat. ").repeat(i + 2) + "The",
                format!("{hero} said: {}", "no ".repeat(3 + i + j)),
                format!("One day, {hero} the {kind}"),
            ]);
        }
    }
    prompts
}

/// On whatever GPU there is, a software one too: answers one after the other, whose tokens the GPU
/// chooses, and the same ones chosen here; with stop strings, contexts that fill up, and interruptions.
#[test]
#[cfg(feature = "gpu")]
fn tokens_computed_in_advance_change_no_answer() {
    let Some(gpu) = common::gpu() else { return };
    let files = Files::tiny_tales();
    let model = files.load(gpu);
    let stops = ["no such text", ".", "the silver", "\n"];
    // One of each form.
    let prompts: Vec<String> = prompts().into_iter().step_by(25).collect();
    let mut reasons = HashSet::new();
    for (repeat_penalty, room) in [(1.0, 24), (1.3, 12)] {
        let ahead = SamplerConfig {
            repeat_penalty,
            ..SamplerConfig::default()
        };
        // A bias that is given twice is for the host, if it is none.
        let by_host = SamplerConfig {
            logit_bias: vec![(0, 0.0); 2],
            ..ahead.clone()
        };
        let [mut ahead, mut by_host] = [ahead, by_host]
            .map(|config| Answering::new(&files, &model, config, &prompts, room, None));
        for (i, prompt) in prompts.iter().enumerate() {
            let stop = stops[i % stops.len()];
            let n_pieces = if i % 4 == 3 { 9 } else { usize::MAX };
            let (expected, _) = by_host.answer(prompt, stop, n_pieces);
            let (found, stats) = ahead.answer(prompt, stop, n_pieces);
            assert_eq!(found, expected, "{prompt}");
            reasons.insert(stats.stop.map(StopReason::describe));
        }
    }
    // Else this shows less than it says.
    assert!(reasons.len() >= 4, "{reasons:?}");
}

/// Every prompt with the built-in model and some with others, one after the other as in a chat: greedily
/// and sampled, with penalties, stop strings and contexts that fill up, and some of the answers interrupted.
#[test]
fn speculation_changes_no_answer() {
    let greedy = SamplerConfig::default();
    let penalised = SamplerConfig {
        repeat_penalty: 1.3,
        ..greedy.clone()
    };
    // How to sample, the room for the answer, and drafts at most.
    let settings = [
        (greedy.clone(), MAX_TOKENS, 8),
        (greedy, 20, 3),
        (sampled(1), MAX_TOKENS, 64),
        (penalised.clone(), 12, 8),
        (
            SamplerConfig {
                temperature: 1.5,
                min_p: 0.05,
                ..sampled(2)
            },
            MAX_TOKENS,
            1,
        ),
        (
            SamplerConfig {
                temperature: 0.4,
                ..penalised
            },
            MAX_TOKENS,
            16,
        ),
        (
            SamplerConfig {
                frequency_penalty: 0.2,
                presence_penalty: 0.4,
                repeat_last_n: 20,
                ..sampled(3)
            },
            15,
            5,
        ),
    ];
    let stops = ["no such text", ".", "the silver", "sat. The", "\n"];
    let prompts = prompts();
    assert_eq!(prompts.len(), 200);
    let (mut n_drafted, mut n_accepted) = (0, 0);
    let mut reasons = HashSet::new();
    for (files, every) in [
        (Files::tiny_tales(), 1),
        (Files::stories(), 2),
        (Files::bitllama(), 3),
    ] {
        let model = files.load(cpu());
        for (i, (sampling, room, max)) in settings.iter().enumerate() {
            let new = |speculate| {
                Answering::new(&files, &model, sampling.clone(), &prompts, *room, speculate)
            };
            let (mut plain, mut drafting) = (new(None), new(Some(*max)));
            // The number of settings has no factor in common with those of forms and stops: each meets all.
            for (j, prompt) in prompts
                .iter()
                .enumerate()
                .skip(i)
                .step_by(settings.len() * every)
            {
                let stop = stops[j % stops.len()];
                let n_pieces = if j % 11 == 3 { 17 } else { usize::MAX };
                let (expected, _) = plain.answer(prompt, stop, n_pieces);
                let (found, stats) = drafting.answer(prompt, stop, n_pieces);
                assert_eq!(found, expected, "{}, {sampling:?}, {prompt}", files.name);
                n_drafted += stats.n_drafted;
                n_accepted += stats.n_accepted;
                reasons.insert(stats.stop.map(StopReason::describe));
            }
        }
    }
    // Else this shows nothing.
    assert!(
        n_accepted > 200 && n_drafted > n_accepted,
        "{n_accepted} of {n_drafted}"
    );
    assert_eq!(reasons.len(), 5, "{reasons:?}");
}

/// Answers on a GPU that is lost before, in the middle of, and after the prompt, and between tokens, as
/// often as is made up for: all that a caller sees is the same.
#[test]
#[cfg(feature = "gpu")]
fn an_answer_goes_on_when_its_device_is_lost() {
    use sterna::ErrorCode;
    use sterna::scheduler::{Scheduler, SchedulerOptions, SequenceId};
    use sterna_engine::{Gpu, Session};

    let files = Files::tiny_tales();
    let open = || -> Option<Session<Gpu>> { Some(session(&files.load(common::gpu()?), 256)) };
    let Some(first) = open() else { return };
    let n_vocab = first.model().config().n_vocab;
    let prompt = files.encode(&"Once upon a time, there was a fox. ".repeat(4));
    let options = SchedulerOptions {
        chunk: 16,
        draw_on_device: true,
        ..SchedulerOptions::default()
    };
    assert!(prompt.len() > 2 * options.chunk, "{}", prompt.len());
    let penalised = SamplerConfig {
        repeat_penalty: 1.3,
        ..sampled(7)
    };
    fn lose(scheduler: &Scheduler<Gpu>, id: SequenceId) {
        let session = scheduler.sequence(id).unwrap().session();
        session.model().backend().device().lose();
    }
    let mut scheduler = Scheduler::new(options);
    let id = scheduler.add(Sequence::new(first));
    // Loses the device after so many parts of the prompt, and before the tokens with these numbers.
    let answer =
        |scheduler: &mut Scheduler<Gpu>, speculate, prefilled: Option<usize>, at: &[usize]| {
            scheduler.sequence_mut(id).unwrap().reset();
            let request = Request {
                max_tokens: 12,
                speculate,
                // What is drawn depends on what was drawn before.
                ..Request::new(
                    prompt.clone(),
                    Sampler::new(penalised.clone(), n_vocab).unwrap(),
                )
            };
            scheduler.start(id, request).unwrap();
            if let Some(n) = prefilled {
                for _ in 0..n {
                    assert!(scheduler.step().unwrap().is_empty());
                }
                lose(scheduler, id);
            }
            let mut at = at.iter().copied().peekable();
            let mut n_lost = 0;
            while !scheduler.is_idle() {
                let n = scheduler.generator(id).unwrap().answer().len();
                if at.next_if(|&at| at <= n).is_some() {
                    lose(scheduler, id);
                }
                for (_, event) in scheduler.step().unwrap() {
                    match event {
                        Event::DeviceLost { message } => {
                            assert!(message.contains("GPU device was lost"), "{message}");
                            n_lost += 1;
                            scheduler.restore(|_| open().ok_or("no GPU")).unwrap();
                        }
                        Event::Failed(error) => return Err(error),
                        _ => {}
                    }
                }
            }
            let generator = scheduler.finish(id).unwrap();
            let stats = Stats {
                prefill: Default::default(),
                decode: Default::default(),
                ..*generator.stats()
            };
            let held = scheduler.sequence(id).unwrap().ids().to_vec();
            Ok((n_lost, (generator.answer().to_vec(), stats, held)))
        };
    for speculate in [None, Some(4)] {
        let (n_lost, expected) = answer(&mut scheduler, speculate, None, &[]).unwrap();
        assert_eq!((n_lost, expected.0.len()), (0, 12));
        for (prefilled, at, n_losses) in [
            (Some(0), &[][..], 1),
            (Some(1), &[1, 2], 3),
            (None, &[0], 1),
            (None, &[5, 6, 10], 3),
        ] {
            // Opening a device takes a second and more; drafts matter once there are tokens.
            if speculate.is_some() && n_losses == 1 {
                continue;
            }
            let (n_lost, found) = answer(&mut scheduler, speculate, prefilled, at).unwrap();
            assert_eq!(found, expected, "{speculate:?}, {prefilled:?}, {at:?}");
            assert_eq!(n_lost, n_losses, "{speculate:?}, {prefilled:?}, {at:?}");
        }
    }
    let error = answer(&mut scheduler, None, None, &[1, 2, 3, 4]).unwrap_err();
    assert_eq!(error.code(), ErrorCode::DeviceLost);
    assert!(
        error.to_string().contains("GPU device was lost"),
        "{error:#}"
    );
    // The next answer is not held to it.
    answer(&mut scheduler, None, None, &[]).unwrap();

    // The model is not loaded again: it is tried as often, and no more.
    lose(&scheduler, id);
    let request = Request::new(
        prompt.clone(),
        Sampler::new(penalised.clone(), n_vocab).unwrap(),
    );
    scheduler.sequence_mut(id).unwrap().reset();
    scheduler.start(id, request).unwrap();
    for n in 0.. {
        let events = scheduler.step().unwrap();
        let [(_, event)] = &events[..] else {
            panic!("{events:?}");
        };
        match event {
            Event::DeviceLost { .. } => assert!(n < 3),
            Event::Failed(error) => {
                assert!(
                    error.to_string().contains("computing the prompt"),
                    "{error:#}"
                );
                assert_eq!((n, error.code()), (3, ErrorCode::DeviceLost));
                break;
            }
            event => panic!("{event:?}"),
        }
    }
    assert!(scheduler.is_idle());
    assert_eq!(
        scheduler.restore(|_| Err("no such file")),
        Err("no such file")
    );
}

/// Lost by another thread, at times that are not chosen: in the midst of recording, submitting or waiting.
#[test]
#[cfg(feature = "gpu")]
fn an_answer_goes_on_whenever_its_device_is_lost() {
    use std::time::Instant;

    use sterna::scheduler::{Scheduler, SchedulerOptions};
    use sterna_engine::{Gpu, Session};

    let files = Files::tiny_tales();
    let open = || -> Option<Session<Gpu>> { Some(session(&files.load(common::gpu()?), 256)) };
    let mut first = open();
    if first.is_none() {
        return;
    }
    let prompt = files.encode(&"Once upon a time, there was a fox. ".repeat(4));
    let mut answer = |lost_after: Option<std::time::Duration>| {
        let session = first.take().or_else(open).unwrap();
        let model = Arc::clone(session.model());
        let sampler = Sampler::new(SamplerConfig::default(), model.config().n_vocab).unwrap();
        let mut scheduler = Scheduler::new(SchedulerOptions::default());
        let id = scheduler.add(Sequence::new(session));
        let request = Request {
            max_tokens: 12,
            ..Request::new(prompt.clone(), sampler)
        };
        scheduler.start(id, request).unwrap();
        let begun = Instant::now();
        let mut n_lost = 0;
        std::thread::scope(|scope| {
            if let Some(lost_after) = lost_after {
                let model = &model;
                scope.spawn(move || {
                    std::thread::sleep(lost_after);
                    model.backend().device().lose();
                });
            }
            while !scheduler.is_idle() {
                for (_, event) in scheduler.step().unwrap() {
                    match event {
                        Event::DeviceLost { .. } => {
                            n_lost += 1;
                            scheduler.restore(|_| open().ok_or("no GPU")).unwrap();
                        }
                        Event::Failed(error) => panic!("{error:#}"),
                        _ => {}
                    }
                }
            }
        });
        let answer = scheduler.finish(id).unwrap().answer().to_vec();
        (answer, n_lost, begun.elapsed())
    };
    let (expected, _, once) = answer(None);
    let mut n_lost = 0;
    for trial in 0..4 {
        let (found, n, _) = answer(Some(once * trial / 4));
        assert_eq!(found, expected, "{trial}");
        assert!(n <= 1, "{trial}: {n}");
        n_lost += n;
    }
    assert!(n_lost > 0);
}

#[test]
#[cfg(feature = "gpu")]
fn a_chat_goes_on_with_the_model_loaded_again() {
    use std::path::Path;

    use sterna::native::{LoadFrom, LocalModel, Located, Weights};
    use sterna::sampling::SamplingOptions;
    use sterna::scheduler::SchedulerOptions;
    use sterna::{Adapted, Chat, ChatOptions, ErrorCode, TextModel};
    use sterna_engine::Gpu;
    use sterna_engine::plan::PlanOptions;

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny-tales");
    let files = LocalModel::open("model", Located::at(&path).unwrap(), None, None).unwrap();
    let open = || -> Option<TextModel<Gpu>> {
        let from = LoadFrom {
            weights: Weights::Mapped,
            experts: None,
            n_threads: 1,
            progress: &|_| {},
        };
        let plan = files.plan(&PlanOptions::default()).unwrap();
        let model = files.load_on(plan, common::gpu()?, &from).unwrap().model;
        let options = SchedulerOptions::gpu();
        let model = TextModel::new(Adapted::new(model), &files, options, &mut Vec::new());
        Some(model.unwrap())
    };
    let options = ChatOptions {
        ctx_len: Some(256),
        sampling: SamplingOptions {
            temperature: Some(0.0),
            ..SamplingOptions::default()
        },
        max_tokens: Some(12),
        ..ChatOptions::default()
    };
    fn say(chat: &mut Chat<'_, Gpu>, text: &str) -> sterna::Result<String> {
        chat.say(text)?.collect()
    }
    let Some(model) = open() else { return };
    let mut chat = model.chat(options.clone()).unwrap();
    say(&mut chat, "Who are you?").unwrap();
    model.model().model().backend().device().lose();
    for _ in 0..2 {
        let error = say(&mut chat, "What is 3 plus 4?").unwrap_err();
        assert_eq!(error.code(), ErrorCode::DeviceLost);
    }
    let again = open().unwrap();
    chat.restore(&again).unwrap();
    say(&mut chat, "What is 3 plus 4?").unwrap();
    let mut expected = again.chat(options).unwrap();
    for text in ["Who are you?", "What is 3 plus 4?"] {
        say(&mut expected, text).unwrap();
    }
    assert_eq!(
        chat.conversation().unwrap().messages(),
        expected.conversation().unwrap().messages()
    );
}
