//! Sessions that are awaited: what a future that isn't ready, or is dropped, leaves behind.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::common::{cpu, load_on, plan_hf, testdata};
use sterna_engine::{
    Backend, Logits, Model, Sampler, SamplerConfig, Session, SessionOptions, Step,
};

const PROMPT: [u32; 6] = [1, 403, 407, 261, 378, 3];

fn model<B: Backend>(backend: B) -> Arc<Model<B>> {
    let (plan, files) = plan_hf(&testdata().join("stories260K/hf"));
    load_on(plan, &files, backend).unwrap()
}

fn session<B: Backend>(model: &Arc<Model<B>>) -> Session<B> {
    let options = SessionOptions {
        chunk: 2,
        ..SessionOptions::new(64)
    };
    Session::new(Arc::clone(model), options).unwrap()
}

fn poll_once<F: Future>(future: F) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn on_the_cpu_everything_is_ready_at_once() {
    let model = model(cpu());
    let (mut waited, mut awaited) = (session(&model), session(&model));
    let want = waited.forward(&PROMPT, Logits::All).unwrap();
    let Poll::Ready(got) = poll_once(awaited.forward_async(&PROMPT, Logits::All)) else {
        panic!("pending");
    };
    assert_eq!(got.unwrap(), want);
    let mut other = session(&model);
    let mut steps =
        [(&mut awaited, &PROMPT[..1]), (&mut other, &PROMPT[..2])].map(|(session, ids)| Step {
            session,
            ids,
            logits: Logits::Last,
        });
    let Poll::Ready(got) = poll_once(Session::forward_together_async(&mut steps)) else {
        panic!("pending");
    };
    let want = waited.forward(&PROMPT[..1], Logits::Last).unwrap();
    assert_eq!(got.unwrap()[0], want);
    let sampler = Sampler::new(SamplerConfig::default(), model.config().n_vocab).unwrap();
    assert!(poll_once(other.decode_async(&[3], sampler.sampling(), 1)).is_ready());
}

#[cfg(feature = "gpu")]
mod on_a_gpu {
    use super::*;
    use sterna_engine::{Decoded, Gpu};
    use sterna_kernels::Isa;

    /// A device of this test's own, which nothing else polls.
    fn gpu() -> Option<Gpu> {
        Some(Gpu::new(sterna_testing::gpu::device()?, 2, Isa::detect()))
    }

    #[test]
    fn a_future_waits_for_the_device_and_may_be_dropped() {
        let Some(gpu) = gpu() else { return };
        let model = model(gpu);
        let want = session(&model).forward(&PROMPT, Logits::All).unwrap();
        let mut session = session(&model);
        // Prompts in chunks, each of which is read.
        assert!(poll_once(session.forward_async(&PROMPT, Logits::All)).is_pending());
        assert_eq!(session.len(), 0);
        assert!(
            session
                .forward(&PROMPT[..2], Logits::None)
                .unwrap()
                .is_empty()
        );
        assert!(poll_once(session.forward_async(&PROMPT[2..], Logits::Last)).is_pending());
        assert_eq!(session.len(), 2);
        let n_vocab = model.config().n_vocab;
        {
            let mut future = pin!(session.forward_async(&PROMPT[2..], Logits::All));
            assert!(poll_once(future.as_mut()).is_pending());
            let got = model.backend().wait(future).unwrap().unwrap();
            assert_eq!(got, want[2 * n_vocab..]);
        }
        assert_eq!(session.len(), PROMPT.len());
        let mut other = super::session(&model);
        let mut steps = [&mut session, &mut other].map(|session| Step {
            session,
            ids: &PROMPT[..1],
            logits: Logits::Last,
        });
        assert!(poll_once(Session::forward_together_async(&mut steps)).is_pending());
        assert_eq!((session.len(), other.len()), (PROMPT.len(), 0));
    }

    #[test]
    fn decoding_goes_on_after_a_dropped_future() {
        let Some(gpu) = gpu() else { return };
        let model = model(gpu);
        let config = SamplerConfig {
            temperature: 0.0,
            ..SamplerConfig::default()
        };
        let start = || {
            let mut session = session(&model);
            session.forward(&PROMPT[..5], Logits::None).unwrap();
            (
                session,
                Sampler::new(config.clone(), model.config().n_vocab).unwrap(),
            )
        };
        let token = |decoded| match decoded {
            Decoded::Token(chosen) => chosen.id,
            Decoded::Logits(_) => panic!("left to the host"),
        };
        let (mut session, mut sampler) = start();
        let (mut last, mut want) = (PROMPT[5], Vec::new());
        for _ in 0..12 {
            last = token(session.decode(&[last], sampler.sampling(), 12).unwrap());
            sampler.accept(last);
            want.push(last);
        }
        let (mut session, mut sampler) = start();
        let (mut last, mut got) = (PROMPT[5], Vec::new());
        for i in 0..12 {
            let len = session.len();
            if i % 3 != 1 {
                // Ready at once if it was computed in advance.
                if let Poll::Ready(decoded) =
                    poll_once(session.decode_async(&[last], sampler.sampling(), 12))
                {
                    last = token(decoded.unwrap());
                    sampler.accept(last);
                    got.push(last);
                    continue;
                }
                assert_eq!(session.len(), len);
            }
            last = token(session.decode(&[last], sampler.sampling(), 12).unwrap());
            sampler.accept(last);
            got.push(last);
        }
        assert_eq!(got, want);
    }
}
