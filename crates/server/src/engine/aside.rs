//! What is computed beside answers, a part between two steps: log-probabilities of tokens, and vectors of texts.

use std::sync::Arc;

use sterna::Result;
use sterna::embedding::{Embedder, Pooling};
use sterna::generate::Logprobs;
use sterna::sequence::Sequence;
use sterna_engine::{Backend, EngineError, Logits};

use super::route::Busy;
use super::worker::Of;
use super::{Output, Reply, Work};

/// Work in parts.
pub(super) struct Aside<B: Backend> {
    pub(super) of: Of<B>,
    pub(super) reply: Reply,
    pub(super) busy: Busy,
    pub(super) task: Task<B>,
}

pub(super) enum Task<B: Backend> {
    Score(Score<B>),
    Embed {
        texts: Vec<Vec<u32>>,
        pooling: Pooling,
        normalised: bool,
        embedder: Embedder<B>,
    },
}

/// Log-probabilities of tokens.
pub(super) struct Score<B: Backend> {
    ids: Vec<u32>,
    n_top: usize,
    pub(super) sequence: Sequence<B>,
    scores: Vec<Logprobs>,
    /// The logits after the newest token.
    last: Vec<f32>,
}

impl<B: Backend> Task<B> {
    /// Log-probabilities of these tokens, with as many of the most likely ones of each.
    pub(super) fn score(ids: Vec<u32>, n_top: usize, sequence: Sequence<B>) -> Task<B> {
        Task::Score(Score {
            sequence,
            scores: Vec::with_capacity(ids.len()),
            last: Vec::new(),
            ids,
            n_top,
        })
    }

    /// Vectors of texts, computed in place of `sequence`.
    pub(super) fn embed(
        texts: Vec<Vec<u32>>,
        pooling: Pooling,
        normalised: bool,
        sequence: Sequence<B>,
    ) -> Task<B> {
        Task::Embed {
            embedder: Embedder::new(sequence.into_session(), pooling, normalised),
            texts,
            pooling,
            normalised,
        }
    }

    /// Tokens that it has left.
    pub(super) fn n_left(&self) -> usize {
        match self {
            Task::Score(Score { ids, sequence, .. }) => ids.len() - sequence.len(),
            Task::Embed {
                texts, embedder, ..
            } => {
                let n_tokens: usize = texts.iter().map(Vec::len).sum();
                n_tokens.saturating_sub(embedder.n_begun())
            }
        }
    }

    /// What is left, to be done by another engine.
    pub(super) fn work(self) -> Work {
        match self {
            Task::Score(Score { ids, n_top, .. }) => Work::Score { ids, n_top },
            Task::Embed {
                texts,
                pooling,
                normalised,
                ..
            } => Work::Embed {
                texts,
                pooling,
                normalised,
            },
        }
    }
}

impl<B: Backend> Score<B> {
    /// Computes the next part of at most `chunk` tokens: what is to be said, and how far it is.
    fn part(&mut self, chunk: usize) -> Result<(Vec<Output>, Part)> {
        let begin = self.sequence.len();
        let end = self.ids.len().min(begin + chunk);
        let rows = (self.sequence).forward(&self.ids[begin..end], Logits::All)?;
        let n_vocab = rows.len() / (end - begin).max(1);
        for (index, row) in rows.chunks_exact(n_vocab.max(1)).enumerate() {
            if begin + index > 0 {
                let id = self.ids[begin + index];
                (self.scores).push(Logprobs::new(&self.last, id, self.n_top));
            }
            self.last.clear();
            self.last.extend_from_slice(row);
        }
        Ok(match end < self.ids.len() {
            true => (Vec::new(), Part::Some),
            false => {
                let scores = std::mem::take(&mut self.scores);
                (vec![Output::Scored(scores)], Part::Last)
            }
        })
    }
}

/// What was done of one of several.
pub(super) enum Part {
    Nothing,
    Some,
    Last,
}

impl<B: Backend> Aside<B> {
    /// Whether texts of `other` may be computed with those of this one, in a batch.
    pub(super) fn may_join(&self, other: &Aside<B>) -> bool {
        let is_whole = |aside: &Aside<B>| match &aside.task {
            Task::Embed { embedder, .. } => embedder.n_begun() == 0,
            Task::Score(_) => false,
        };
        let (of, other_of) = (&self.of, &other.of);
        is_whole(self)
            && is_whole(other)
            && Arc::ptr_eq(&of.model, &other_of.model)
            && of.identity.generation == other_of.identity.generation
    }

    /// Does the next part of `together`, which is one, or several that [may be joined](Aside::may_join): at most `chunk` tokens,
    /// or a whole text where the model reads no parts.
    pub(super) fn parts(together: &mut [Aside<B>], chunk: usize) -> Result<Vec<Part>> {
        let outputs = match together {
            [
                Aside {
                    task: Task::Score(score),
                    ..
                },
            ] => vec![score.part(chunk)?],
            _ => Aside::embed(together, chunk)?,
        };
        let mut parts = Vec::with_capacity(outputs.len());
        for (aside, (outputs, mut part)) in together.iter().zip(outputs) {
            for output in outputs {
                // Whoever doesn't read the last output is gone; who is slow before that is given up.
                if aside.reply.send(output).is_err() {
                    part = Part::Last;
                    break;
                }
            }
            parts.push(part);
        }
        Ok(parts)
    }

    /// Vectors of texts, and how far they are.
    fn embed(together: &mut [Aside<B>], chunk: usize) -> Result<Vec<(Vec<Output>, Part)>> {
        let Some(first) = together.first() else {
            return Ok(Vec::new());
        };
        let model = Arc::clone(&first.of.model);
        let mut all = Vec::with_capacity(together.len());
        for aside in &mut *together {
            if let Task::Embed {
                texts, embedder, ..
            } = &mut aside.task
            {
                all.push((embedder, &texts[..]));
            }
        }
        let vectors = (model.adapted.model().backend())
            .wait(Embedder::advance_together(&mut all, chunk))
            .map_err(EngineError::from)??;
        let begun = all.iter().map(|(embedder, _)| embedder.n_begun() > 0);
        let begun: Vec<bool> = begun.collect();
        let done = together.iter_mut().zip(vectors).zip(begun);
        let done = done.map(|((aside, vectors), has_begun)| {
            let Task::Embed { texts, .. } = &mut aside.task else {
                return (Vec::new(), Part::Nothing);
            };
            texts.drain(..vectors.len());
            let part = match (texts.is_empty(), vectors.is_empty() && !has_begun) {
                (true, _) => Part::Last,
                (_, true) => Part::Nothing,
                _ => Part::Some,
            };
            let outputs = vectors.into_iter().map(Output::Embedded);
            (outputs.collect(), part)
        });
        Ok(done.collect())
    }
}
