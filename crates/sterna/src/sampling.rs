//! Sampling settings, with the model's recommendations as defaults.

use std::hash::{BuildHasher, Hasher, RandomState};

use sterna_engine::SamplerConfig;
use sterna_format::hf::GenerationConfig;

/// Settings of a sampler. The defaults are the model's recommendations, or else values that suit most models.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingOptions {
    /// [`SamplerConfig::temperature`].
    pub temperature: Option<f32>,
    /// [`SamplerConfig::top_k`].
    pub top_k: Option<usize>,
    /// [`SamplerConfig::top_p`].
    pub top_p: Option<f32>,
    /// [`SamplerConfig::min_p`].
    pub min_p: Option<f32>,
    /// [`SamplerConfig::repeat_penalty`].
    pub repeat_penalty: Option<f32>,
    /// [`SamplerConfig::repeat_last_n`].
    pub repeat_last_n: Option<usize>,
    /// [`SamplerConfig::frequency_penalty`].
    pub frequency_penalty: Option<f32>,
    /// [`SamplerConfig::presence_penalty`].
    pub presence_penalty: Option<f32>,
    /// [`SamplerConfig::logit_bias`].
    pub logit_bias: Vec<(u32, f32)>,
    /// [`SamplerConfig::seed`]; the default is random ([`random_seed`]).
    pub seed: Option<u64>,
}

impl SamplingOptions {
    /// These settings, completed with the recommendations of `model`, and those with values that suit most
    /// models.
    pub fn config(&self, model: &GenerationConfig) -> SamplerConfig {
        let recommended = recommendation(model);
        SamplerConfig {
            temperature: self.temperature.unwrap_or(recommended.temperature),
            top_k: self.top_k.unwrap_or(recommended.top_k),
            top_p: self.top_p.unwrap_or(recommended.top_p),
            min_p: self.min_p.unwrap_or(recommended.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(recommended.repeat_penalty),
            repeat_last_n: self.repeat_last_n.unwrap_or(recommended.repeat_last_n),
            frequency_penalty: self
                .frequency_penalty
                .unwrap_or(recommended.frequency_penalty),
            presence_penalty: self
                .presence_penalty
                .unwrap_or(recommended.presence_penalty),
            logit_bias: self.logit_bias.clone(),
            seed: self.seed.unwrap_or_else(random_seed),
        }
    }
}

/// The model's recommendations, or else values that suit most models.
fn recommendation(model: &GenerationConfig) -> SamplerConfig {
    let repeat_penalty = model
        .repetition_penalty
        .map_or(1.0, |penalty| penalty as f32);
    // Transformers, which the recommendations are made for, penalises every token of the context.
    let repeat_last_n = match model.repetition_penalty {
        Some(_) => usize::MAX,
        None => SamplerConfig::default().repeat_last_n,
    };
    let says_how = model.temperature.is_some() || model.top_k.is_some() || model.top_p.is_some();
    if model.do_sample == Some(false) {
        return SamplerConfig {
            repeat_penalty,
            repeat_last_n,
            ..SamplerConfig::default()
        };
    }
    if model.do_sample.is_none() && !says_how {
        return SamplerConfig {
            temperature: 0.7,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty,
            repeat_last_n,
            ..SamplerConfig::default()
        };
    }
    // A stage that a recommendation omits is off, except for what Transformers adds by default.
    SamplerConfig {
        temperature: model
            .temperature
            .map_or(1.0, |temperature| temperature as f32),
        top_k: model.top_k.unwrap_or(50),
        top_p: model.top_p.map_or(1.0, |p| p as f32),
        min_p: model.min_p.map_or(0.0, |p| p as f32),
        repeat_penalty,
        repeat_last_n,
        ..SamplerConfig::default()
    }
}

/// A random seed. Where the standard library has no random numbers, as in a browser, it is the same each time
/// the program starts: provide one there.
pub fn random_seed() -> u64 {
    // The standard library seeds its hash maps randomly. Short enough to be typed again.
    RandomState::new().build_hasher().finish() >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generation_config(json: &str) -> GenerationConfig {
        GenerationConfig::parse(json.as_bytes()).unwrap()
    }

    /// Temperature, top-k, top-p, min-p and repeat penalty.
    fn settings(options: &SamplingOptions, json: &str) -> (f32, usize, f32, f32, f32) {
        let c = options.config(&generation_config(json));
        (c.temperature, c.top_k, c.top_p, c.min_p, c.repeat_penalty)
    }

    #[test]
    fn options_win_over_the_model_which_wins_over_defaults() {
        let none = SamplingOptions::default();
        assert_eq!(settings(&none, "{}"), (0.7, 40, 0.95, 0.05, 1.0));
        let tales = r#"{"do_sample": true, "temperature": 0.5, "top_k": 20}"#;
        assert_eq!(settings(&none, tales), (0.5, 20, 1.0, 0.0, 1.0));
        assert_eq!(
            settings(&none, r#"{"do_sample": true}"#),
            (1.0, 50, 1.0, 0.0, 1.0)
        );
        let greedy = r#"{"do_sample": false, "temperature": 0.9, "repetition_penalty": 1.25}"#;
        assert_eq!(settings(&none, greedy), (0.0, 0, 1.0, 0.0, 1.25));
        let options = SamplingOptions {
            temperature: Some(0.0),
            min_p: Some(0.25),
            ..none
        };
        assert_eq!(settings(&options, tales), (0.0, 20, 1.0, 0.25, 1.0));
    }

    #[test]
    fn seeds_differ_unless_given() {
        let config = GenerationConfig::default();
        let seed = |options: SamplingOptions| options.config(&config).seed;
        assert_eq!(
            seed(SamplingOptions {
                seed: Some(7),
                ..Default::default()
            }),
            7
        );
        assert_ne!(
            seed(SamplingOptions::default()),
            seed(SamplingOptions::default())
        );
    }
}
