//! The self-test of a device's kernels.
#![cfg(feature = "gpu")]

use std::collections::BTreeSet;

use sterna_engine::self_test::{KernelFamilies, WeightForm, self_test};
use sterna_engine::{CacheType, Gpu};
use sterna_format::DType;
use sterna_gpu::{Device, DeviceOptions, Features};
use sterna_kernels::Isa;
use sterna_kernels::experts::{Gating, Routing};
use sterna_kernels::rwkv::Generation::{V4, V5, V6, V7};

const ROUTING: Routing = Routing {
    gating: Gating::Softmax,
    n_experts: 60,
    n_used: 4,
    renormalised: false,
    groups: None,
    scale: 1.0,
};

#[test]
fn a_device_passes_with_any_features() {
    for features in [Features::ALL, Features::NONE] {
        let options = DeviceOptions {
            features,
            ..DeviceOptions::default()
        };
        let Some(device) = sterna_testing::gpu::device_with(&options) else {
            return;
        };
        // What caches differ in is the same with any features.
        let caches = match features == Features::ALL {
            true => &[CacheType::F32, CacheType::F16, CacheType::Q8_0][..],
            false => &[CacheType::F16],
        };
        check(device, caches);
    }
}

fn check(device: Device, caches: &[CacheType]) {
    let gpu = Gpu::new(device, 1, Isa::detect());
    let blocks = [DType::F16, DType::Q8_0, DType::Q4_K, DType::Q1_0];
    let forms: BTreeSet<_> = blocks.map(WeightForm::Blocks).into_iter().collect();
    for &cache in caches {
        let has_all = cache == CacheType::F16;
        let kernels = KernelFamilies {
            forms: forms.clone(),
            experts: has_all.then_some(ROUTING),
            has_states: has_all,
            rwkv: None,
            is_rotated: has_all,
            has_gates: has_all,
            is_encoder: false,
            is_latent: true,
            is_layerwise: true,
        };
        let tested = self_test(&gpu, &kernels, cache);
        gpu.device().block_on(tested).unwrap().unwrap();
    }
    for generation in [V4, V5, V6, V7] {
        let kernels = KernelFamilies {
            is_encoder: generation == V7,
            rwkv: Some(generation),
            ..KernelFamilies::default()
        };
        let tested = self_test(&gpu, &kernels, CacheType::F32);
        gpu.device().block_on(tested).unwrap().unwrap();
    }
}
