//! Which files make which shader.

use super::Access::{Read, Write};
use super::text::wgsl;
use super::{Lib, Need, Params, Shader};
use crate::kernels::attention::{AttentionParams, CombineParams, HeadsParams, SplitKvParams};
use crate::kernels::elementwise::{ElementwiseParams, SigmoidGateParams};
use crate::kernels::experts::{CombineExpertsParams, ExpertBiasParams, RouteParams};
use crate::kernels::linear::{EmbedParams, GroupRoutesParams, LinearParams, TwoLinearParams};
use crate::kernels::norm::{LayerNormParams, RmsNormParams};
use crate::kernels::output::{
    LogProbabilityParams, MaskParams, PenalizeParams, PerturbParams, SampleParams, TopKParams,
    WeighParams,
};
use crate::kernels::quantize::{DequantizeParams, HalveParams, QuantizeParams};
use crate::kernels::recurrent::{
    ConvParams, MambaParams, PrepareParams, PreviousParams, ScanParams, ShiftParams, StepParams,
    Wkv4Params, WkvFinishParams, WkvParams, WkvPrepareParams,
};
use crate::kernels::rotate::RotateParams;

pub(super) const REDUCE_SUBGROUP: &str = wgsl!("../shaders/lib/reduce_subgroup.wgsl");
pub(super) const REDUCE_SHARED: &str = wgsl!("../shaders/lib/reduce_shared.wgsl");
pub(super) const DOT4_PACKED: &str = wgsl!(
    "../shaders/lib/dot4_packed.wgsl",
    "../shaders/lib/dot16.wgsl",
);
pub(super) const DOT4_PLAIN: &str = wgsl!(
    "../shaders/lib/dot4_plain.wgsl",
    "../shaders/lib/dot16.wgsl",
);

/// Blocks whose units are consecutive runs.
macro_rules! in_order {
    ($($file:literal),*) => {
        Lib::File(wgsl!(
            $($file,)*
            "../shaders/lib/units_in_order.wgsl",
            "../shaders/lib/runs_of_units.wgsl",
        ))
    };
}

const EXACT: Lib = Lib::File(wgsl!("../shaders/lib/exact.wgsl"));
const RANDOM: Lib = Lib::File(wgsl!("../shaders/lib/random.wgsl"));
const ACTIVATION: Lib = Lib::File(wgsl!("../shaders/lib/activation.wgsl"));
const SOFTPLUS: Lib = Lib::File(wgsl!("../shaders/lib/softplus.wgsl"));
const EPILOGUE: Lib = Lib::File(wgsl!("../shaders/lib/epilogue.wgsl"));
const ATTENTION_IO: Lib = Lib::File(wgsl!("../shaders/lib/attention_io.wgsl"));
const HALVES: Lib = Lib::File(wgsl!("../shaders/lib/halves.wgsl"));
const COOP: Lib = Lib::File(wgsl!(
    "../shaders/lib/halves.wgsl",
    "../shaders/lib/coop.wgsl",
));
const COLUMNS_TERNARY: Lib = Lib::File(wgsl!(
    "../shaders/lib/quarters.wgsl",
    "../shaders/lib/columns_ternary.wgsl",
));
const COOP_TERNARY: Lib = Lib::File(wgsl!(
    "../shaders/lib/quarters.wgsl",
    "../shaders/lib/coop_ternary.wgsl",
));
const COOP_ONE_MATRIX: Lib = Lib::File(wgsl!("../shaders/lib/coop_one_matrix.wgsl"));
const COOP_EVERY_ROW: Lib = Lib::File(wgsl!(
    "../shaders/lib/coop_one_matrix.wgsl",
    "../shaders/lib/coop_every_row.wgsl",
));
const COOP_ROUTED_ROWS: Lib = Lib::File(wgsl!(
    "../shaders/lib/grid.wgsl",
    "../shaders/lib/expert_matrix.wgsl",
    "../shaders/lib/coop_routed_rows.wgsl",
));
const COOP_SUMS_TERNARY: Lib = Lib::File(wgsl!("../shaders/lib/coop_sums_ternary.wgsl"));
const HALF_RANGE: Lib = Lib::File(wgsl!("../shaders/lib/half_range.wgsl"));
const COOP_SUMS_BLOCKS: Lib = Lib::File(wgsl!(
    "../shaders/lib/half_range.wgsl",
    "../shaders/lib/coop_sums_blocks.wgsl",
));
const COOP_BLOCKS: Lib = Lib::File(wgsl!("../shaders/lib/coop_blocks.wgsl"));
const GRID: Lib = Lib::File(wgsl!("../shaders/lib/grid.wgsl"));
const IO_SEPARATE: Lib = Lib::File(wgsl!("../shaders/lib/io_separate.wgsl"));
const IO_IN_PLACE: Lib = Lib::File(wgsl!("../shaders/lib/io_in_place.wgsl"));

const HEADS_PARAMS: Lib = Lib::File(wgsl!("../shaders/lib/heads_params.wgsl"));
const ROWS_AS_THEY_ARE: Lib = Lib::File(wgsl!("../shaders/lib/rows_as_they_are.wgsl"));
const ROWS_OF_SUMS: Lib = Lib::File(wgsl!("../shaders/lib/rows_of_sums.wgsl"));
const CACHE_F32: Lib = Lib::File(wgsl!("../shaders/lib/cache_f32.wgsl"));
const CACHE_F16: Lib = Lib::File(wgsl!("../shaders/lib/cache_f16.wgsl"));
const CACHE_Q8_0: Lib = Lib::File(wgsl!("../shaders/lib/cache_q8_0.wgsl"));
const CACHE_WORDS: Lib = Lib::File(wgsl!("../shaders/lib/cache_words.wgsl"));
const SEQUENCES: Lib = Lib::File(wgsl!("../shaders/lib/sequences.wgsl"));
const STATES: Lib = Lib::File(wgsl!("../shaders/lib/states.wgsl"));
const SAMPLERS: Lib = Lib::File(wgsl!("../shaders/lib/samplers.wgsl"));
const PAGES: Lib = Lib::File(wgsl!("../shaders/lib/pages.wgsl"));
const SOFTCAP: Lib = Lib::File(wgsl!("../shaders/lib/softcap.wgsl"));
const LINEAR_PARAMS: Lib = Lib::File(wgsl!("../shaders/lib/linear_params.wgsl"));
const PARAMS_OF_TWO: Lib = Lib::File(wgsl!("../shaders/lib/linear_params_of_two.wgsl"));
const EVERY_ROW: Lib = Lib::File(wgsl!("../shaders/lib/every_row.wgsl"));
const ROUTED_ROWS: Lib = Lib::File(wgsl!(
    "../shaders/lib/routed_rows.wgsl",
    "../shaders/lib/expert_matrix.wgsl",
));
const RANKS: Lib = Lib::File(wgsl!("../shaders/lib/ranks.wgsl"));
const CHOSEN_ROWS: Lib = Lib::File(wgsl!(
    "../shaders/lib/chosen_rows.wgsl",
    "../shaders/lib/expert_matrix.wgsl",
));
const BLOCK_PLANES: Lib = Lib::File(wgsl!("../shaders/lib/block_planes.wgsl"));
const GEMM_TILE: Lib = Lib::File(wgsl!("../shaders/lib/gemm_tile.wgsl"));
const FLOATS_OF_CODES: Lib = Lib::File(wgsl!("../shaders/lib/floats_of_codes.wgsl"));
const INPUT_STORED: Lib = Lib::File(wgsl!("../shaders/lib/input_stored.wgsl"));
const INPUT_ROUNDED: Lib = Lib::File(wgsl!("../shaders/lib/input_rounded.wgsl"));
const X_VECTORS: Lib = Lib::File(wgsl!("../shaders/lib/x_vectors.wgsl"));
const X_READ_ONLY: Lib = Lib::File(wgsl!("../shaders/lib/x_read_only.wgsl"));
const X_OF_SUMS: Lib = Lib::File(wgsl!("../shaders/lib/x_of_sums.wgsl"));
const SUMS_TERNARY: Lib = Lib::File(wgsl!("../shaders/lib/sums_ternary.wgsl"));
const SUMS_BLOCKS: Lib = Lib::File(wgsl!("../shaders/lib/sums_blocks.wgsl"));
const X_ELEMENTS: Lib = Lib::File(wgsl!("../shaders/lib/x_elements.wgsl"));
const WEIGHTS_VECTORS: Lib = Lib::File(wgsl!("../shaders/lib/weights_vectors.wgsl"));
const WEIGHTS_ELEMENTS: Lib = Lib::File(wgsl!("../shaders/lib/weights_elements.wgsl"));
const CODES_Q8_0: Lib = in_order!(
    "../shaders/lib/codes_q8_0.wgsl",
    "../shaders/lib/unit_scale.wgsl"
);
const CODES_Q4_0: Lib = in_order!(
    "../shaders/lib/codes_q4_0.wgsl",
    "../shaders/lib/unit_vector.wgsl",
    "../shaders/lib/unit_scale.wgsl"
);
const CODES_Q4_K: Lib = in_order!("../shaders/lib/codes_q4_k.wgsl");
const CODES_Q6_K: Lib = Lib::File(wgsl!(
    "../shaders/lib/codes_q6_k.wgsl",
    "../shaders/lib/runs_of_units.wgsl",
));
const CODES_Q1_0: Lib = in_order!(
    "../shaders/lib/codes_q1_0.wgsl",
    "../shaders/lib/unit_vector.wgsl",
    "../shaders/lib/unit_scale.wgsl"
);
const CODES_Q2_0: Lib = in_order!(
    "../shaders/lib/codes_q2_0.wgsl",
    "../shaders/lib/unit_vector.wgsl",
    "../shaders/lib/unit_scale.wgsl"
);
const CODES_TERNARY: Lib = Lib::File(wgsl!("../shaders/lib/codes_ternary.wgsl"));
const FLOATS_F32: Lib = Lib::File(wgsl!("../shaders/lib/floats_f32.wgsl"));
const FLOATS_F16: Lib = Lib::File(wgsl!("../shaders/lib/floats_f16.wgsl"));
const FLOATS_BF16: Lib = Lib::File(wgsl!("../shaders/lib/floats_bf16.wgsl"));

/// A shader whose workgroups follow those of another, if there is one.
macro_rules! second {
    () => {
        None
    };
    ($name:ident) => {
        Some(&$name)
    };
}

/// Defines shaders, and [`ALL`] of them.
macro_rules! shaders {
    ($($(#[$doc:meta])* $name:ident = $file:literal, [$($lib:expr),*], [$($access:expr),*],
        $params:ty, [$($need:expr),*] $(, beside $second:ident)?;)*) => {
        $(
            $(#[$doc])*
            pub(crate) static $name: Shader = Shader {
                name: stringify!($name),
                source: wgsl!(concat!("../shaders/", $file, ".wgsl")),
                libs: &[$($lib),*],
                bindings: &[$($access),*],
                params: <$params>::FIELDS,
                needs: &[$($need),*],
                second: second!($($second)?),
            };
        )*
        /// Every shader.
        pub static ALL: &[&Shader] = &[$(&$name),*];
    };
}

shaders! {
    RMS_NORM = "rms_norm", [Lib::Reduce, GRID, IO_SEPARATE], [Read, Write, Read], RmsNormParams, [];
    RMS_NORM_IN_PLACE = "rms_norm", [Lib::Reduce, GRID, IO_IN_PLACE], [Read, Write], RmsNormParams, [];
    LAYER_NORM = "layer_norm", [Lib::Reduce, GRID], [Read, Read, Read, Write], LayerNormParams, [];
    QUANTIZE = "quantize", [Lib::Reduce, GRID, EXACT, HALF_RANGE, X_VECTORS, X_READ_ONLY, WEIGHTS_VECTORS],
        [Write, Read, Read, Write, Write], QuantizeParams, [];
    QUANTIZE_SUMS_TERNARY = "quantize", [Lib::Reduce, GRID, EXACT, HALF_RANGE, X_OF_SUMS, SUMS_TERNARY, WEIGHTS_VECTORS],
        [Write, Read, Write, Write, Write, Read, Read], QuantizeParams, [];
    QUANTIZE_SUMS_BLOCKS = "quantize", [Lib::Reduce, GRID, EXACT, HALF_RANGE, X_OF_SUMS, SUMS_BLOCKS, WEIGHTS_VECTORS],
        [Write, Read, Write, Write, Write, Read], QuantizeParams, [];
    QUANTIZE_ELEMENTS = "quantize", [Lib::Reduce, GRID, EXACT, HALF_RANGE, X_ELEMENTS, X_READ_ONLY, WEIGHTS_ELEMENTS],
        [Write, Read, Read, Write, Write], QuantizeParams, [];
    ELEMENTWISE = "elementwise", [ACTIVATION], [Write, Read], ElementwiseParams, [];
    TERNARY_GEMV = "ternary_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_STORED, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    TERNARY_GEMV_ROUNDING = "ternary_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_ROUNDED, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    TERNARY_GEMM = "ternary_gemm", [Lib::Dot4, LINEAR_PARAMS, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMV_Q8_0 = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_STORED, BLOCK_PLANES, CODES_Q8_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMV_Q8_0_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q8_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMM_Q8_0 = "block_gemm", [Lib::Dot4, LINEAR_PARAMS, BLOCK_PLANES, CODES_Q8_0, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    EMBED_Q8_0 = "embed", [BLOCK_PLANES, CODES_Q8_0, FLOATS_OF_CODES], [Read, Read, Read, Write], EmbedParams, [];
    GEMV_Q4_0 = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_STORED, BLOCK_PLANES, CODES_Q4_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMV_Q4_0_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q4_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMM_Q4_0 = "block_gemm", [Lib::Dot4, LINEAR_PARAMS, BLOCK_PLANES, CODES_Q4_0, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    EMBED_Q4_0 = "embed", [BLOCK_PLANES, CODES_Q4_0, FLOATS_OF_CODES], [Read, Read, Read, Write], EmbedParams, [];
    GEMV_Q4_K = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_STORED, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMV_Q4_K_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMM_Q4_K = "block_gemm", [Lib::Dot4, LINEAR_PARAMS, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    EMBED_Q4_K = "embed", [BLOCK_PLANES, CODES_Q4_K, FLOATS_OF_CODES], [Read, Read, Read, Write], EmbedParams, [];
    GEMV_Q6_K = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_STORED, BLOCK_PLANES, CODES_Q6_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMV_Q6_K_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q6_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMV_Q4_K_AND_Q6_K = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, PARAMS_OF_TWO, EVERY_ROW, INPUT_STORED, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read, Read], TwoLinearParams, [], beside GEMV_Q6_K;
    GEMV_Q4_K_AND_Q6_K_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, PARAMS_OF_TWO, EVERY_ROW, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read, Read], TwoLinearParams, [], beside GEMV_Q6_K_ROUNDING;
    GEMM_Q6_K = "block_gemm", [Lib::Dot4, LINEAR_PARAMS, BLOCK_PLANES, CODES_Q6_K, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    EMBED_Q6_K = "embed", [BLOCK_PLANES, CODES_Q6_K, FLOATS_OF_CODES], [Read, Read, Read, Write], EmbedParams, [];
    GEMV_Q1_0 = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_STORED, BLOCK_PLANES, CODES_Q1_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMV_Q1_0_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q1_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMM_Q1_0 = "block_gemm", [Lib::Dot4, LINEAR_PARAMS, BLOCK_PLANES, CODES_Q1_0, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    EMBED_Q1_0 = "embed", [BLOCK_PLANES, CODES_Q1_0, FLOATS_OF_CODES], [Read, Read, Read, Write], EmbedParams, [];
    GEMV_Q2_0 = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_STORED, BLOCK_PLANES, CODES_Q2_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMV_Q2_0_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, EVERY_ROW, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q2_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    GEMM_Q2_0 = "block_gemm", [Lib::Dot4, LINEAR_PARAMS, BLOCK_PLANES, CODES_Q2_0, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Read, Write], LinearParams, [];
    EMBED_Q2_0 = "embed", [BLOCK_PLANES, CODES_Q2_0, FLOATS_OF_CODES], [Read, Read, Read, Write], EmbedParams, [];
    EMBED_TERNARY = "embed", [BLOCK_PLANES, CODES_TERNARY, FLOATS_OF_CODES], [Read, Read, Read, Write], EmbedParams, [];
    GEMV_F32 = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, EVERY_ROW, FLOATS_F32, X_VECTORS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read], LinearParams, [];
    GEMM_F32 = "float_gemm", [LINEAR_PARAMS, FLOATS_F32, X_VECTORS, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Write], LinearParams, [];
    GEMV_F32_ELEMENTS = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, EVERY_ROW, FLOATS_F32, X_ELEMENTS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read], LinearParams, [];
    GEMM_F32_ELEMENTS = "float_gemm", [LINEAR_PARAMS, FLOATS_F32, X_ELEMENTS, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Write], LinearParams, [];
    EMBED_F32 = "embed", [FLOATS_F32], [Read, Read, Read, Write], EmbedParams, [];
    GEMV_F16 = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, EVERY_ROW, FLOATS_F16, X_VECTORS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read], LinearParams, [];
    GEMM_F16 = "float_gemm", [LINEAR_PARAMS, FLOATS_F16, X_VECTORS, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Write], LinearParams, [];
    GEMM_F16_COOP = "gemm_f16_coop", [LINEAR_PARAMS, HALVES, HALF_RANGE, FLOATS_F16, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMV_F16_ELEMENTS = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, EVERY_ROW, FLOATS_F16, X_ELEMENTS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read], LinearParams, [];
    GEMM_F16_ELEMENTS = "float_gemm", [LINEAR_PARAMS, FLOATS_F16, X_ELEMENTS, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Write], LinearParams, [];
    EMBED_F16 = "embed", [FLOATS_F16], [Read, Read, Read, Write], EmbedParams, [];
    GEMV_BF16 = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, EVERY_ROW, FLOATS_BF16, X_VECTORS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read], LinearParams, [];
    GEMM_BF16 = "float_gemm", [LINEAR_PARAMS, FLOATS_BF16, X_VECTORS, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Write], LinearParams, [];
    GEMV_BF16_ELEMENTS = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, EVERY_ROW, FLOATS_BF16, X_ELEMENTS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read], LinearParams, [];
    GEMM_BF16_ELEMENTS = "float_gemm", [LINEAR_PARAMS, FLOATS_BF16, X_ELEMENTS, ACTIVATION, EPILOGUE, GEMM_TILE],
        [Read, Read, Read, Write], LinearParams, [];
    EMBED_BF16 = "embed", [FLOATS_BF16], [Read, Read, Read, Write], EmbedParams, [];
    HEADS = "heads", [Lib::Reduce, GRID, HEADS_PARAMS, EXACT, SEQUENCES, PAGES, CACHE_WORDS], [Write, Read, Read, Read, Read, Write, Write], HeadsParams, [];
    HEADS_IN_VECTORS = "heads_in_vectors", [Lib::Reduce, GRID, HEADS_PARAMS, SEQUENCES, PAGES], [Write, Read, Read, Read, Read, Write, Write],
        HeadsParams, [];
    ATTENTION_F32 = "attention", [ATTENTION_IO, SEQUENCES, PAGES, CACHE_F32, SOFTCAP], [Read, Read, Read, Read, Read, Write], AttentionParams, [];
    ATTENTION_F16 = "attention", [ATTENTION_IO, SEQUENCES, PAGES, CACHE_F16, SOFTCAP], [Read, Read, Read, Read, Read, Write], AttentionParams, [];
    ATTENTION_Q8_0 = "attention", [ATTENTION_IO, SEQUENCES, PAGES, CACHE_Q8_0, SOFTCAP], [Read, Read, Read, Read, Read, Write], AttentionParams, [];
    ATTENTION_F16_COOP = "attention_coop", [ATTENTION_IO, SEQUENCES, PAGES, CACHE_F16, SOFTCAP], [Read, Read, Read, Read, Read, Write], AttentionParams,
        [Need::F16, Need::CooperativeMatrix];
    ATTENTION_Q8_0_COOP = "attention_coop", [ATTENTION_IO, SEQUENCES, PAGES, CACHE_Q8_0, SOFTCAP], [Read, Read, Read, Read, Read, Write], AttentionParams,
        [Need::F16, Need::CooperativeMatrix];
    ATTENTION_SPLIT_KV_F32 = "attention_split_kv", [Lib::Reduce, GRID, EXACT, ROWS_AS_THEY_ARE, SEQUENCES, PAGES, CACHE_F32, CACHE_WORDS, SOFTCAP],
        [Read, Read, Read, Read, Read, Write, Write, Write], SplitKvParams, [];
    ATTENTION_OF_SUMS_F32 = "attention_split_kv", [Lib::Reduce, GRID, EXACT, ROWS_OF_SUMS, SEQUENCES, PAGES, CACHE_F32, CACHE_WORDS, SOFTCAP],
        [Read, Read, Read, Read, Read, Write, Write, Write], SplitKvParams, [];
    ATTENTION_SPLIT_KV_F16 = "attention_split_kv", [Lib::Reduce, GRID, EXACT, ROWS_AS_THEY_ARE, SEQUENCES, PAGES, CACHE_F16, CACHE_WORDS, SOFTCAP],
        [Read, Read, Read, Read, Read, Write, Write, Write], SplitKvParams, [];
    ATTENTION_OF_SUMS_F16 = "attention_split_kv", [Lib::Reduce, GRID, EXACT, ROWS_OF_SUMS, SEQUENCES, PAGES, CACHE_F16, CACHE_WORDS, SOFTCAP],
        [Read, Read, Read, Read, Read, Write, Write, Write], SplitKvParams, [];
    ATTENTION_SPLIT_KV_Q8_0 = "attention_split_kv", [Lib::Reduce, GRID, EXACT, ROWS_AS_THEY_ARE, SEQUENCES, PAGES, CACHE_Q8_0, CACHE_WORDS, SOFTCAP],
        [Read, Read, Read, Read, Read, Write, Write, Write], SplitKvParams, [];
    ATTENTION_OF_SUMS_Q8_0 = "attention_split_kv", [Lib::Reduce, GRID, EXACT, ROWS_OF_SUMS, SEQUENCES, PAGES, CACHE_Q8_0, CACHE_WORDS, SOFTCAP],
        [Read, Read, Read, Read, Read, Write, Write, Write], SplitKvParams, [];
    ATTENTION_COMBINE = "attention_combine", [SEQUENCES], [Read, Read, Read, Write], CombineParams, [];
    EXPERTS_TERNARY = "ternary_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_STORED, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_TERNARY_ROUNDING = "ternary_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_ROUNDED, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_TERNARY_CHOOSING = "ternary_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, RANKS, CHOSEN_ROWS, INPUT_ROUNDED, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read, Write, Write], LinearParams, [];
    EXPERTS_Q8_0 = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_STORED, BLOCK_PLANES, CODES_Q8_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q8_0_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q8_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q8_0_CHOOSING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, RANKS, CHOSEN_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q8_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read, Write, Write], LinearParams, [];
    EXPERTS_Q4_0 = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_STORED, BLOCK_PLANES, CODES_Q4_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q4_0_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q4_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q4_0_CHOOSING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, RANKS, CHOSEN_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q4_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read, Write, Write], LinearParams, [];
    EXPERTS_Q4_K = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_STORED, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q4_K_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q4_K_CHOOSING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, RANKS, CHOSEN_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read, Write, Write], LinearParams, [];
    EXPERTS_Q6_K = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_STORED, BLOCK_PLANES, CODES_Q6_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q6_K_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q6_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q6_K_CHOOSING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, RANKS, CHOSEN_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q6_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read, Write, Write], LinearParams, [];
    EXPERTS_Q1_0 = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_STORED, BLOCK_PLANES, CODES_Q1_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q1_0_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q1_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q1_0_CHOOSING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, RANKS, CHOSEN_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q1_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read, Write, Write], LinearParams, [];
    EXPERTS_Q2_0 = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_STORED, BLOCK_PLANES, CODES_Q2_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q2_0_ROUNDING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, ROUTED_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q2_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [];
    EXPERTS_Q2_0_CHOOSING = "block_gemv", [Lib::Reduce, Lib::Dot4, GRID, LINEAR_PARAMS, RANKS, CHOSEN_ROWS, INPUT_ROUNDED, EXACT, BLOCK_PLANES, CODES_Q2_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read, Write, Write], LinearParams, [];
    EXPERTS_F32 = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, ROUTED_ROWS, FLOATS_F32, X_VECTORS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read, Read], LinearParams, [];
    EXPERTS_F32_ELEMENTS = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, ROUTED_ROWS, FLOATS_F32, X_ELEMENTS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read, Read], LinearParams, [];
    EXPERTS_F16 = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, ROUTED_ROWS, FLOATS_F16, X_VECTORS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read, Read], LinearParams, [];
    EXPERTS_F16_ELEMENTS = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, ROUTED_ROWS, FLOATS_F16, X_ELEMENTS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read, Read], LinearParams, [];
    EXPERTS_BF16 = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, ROUTED_ROWS, FLOATS_BF16, X_VECTORS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read, Read], LinearParams, [];
    EXPERTS_BF16_ELEMENTS = "float_gemv", [Lib::Reduce, GRID, LINEAR_PARAMS, ROUTED_ROWS, FLOATS_BF16, X_ELEMENTS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Write, Read, Read], LinearParams, [];
    SIGMOID_GATE = "sigmoid_gate", [], [Write, Read, Read], SigmoidGateParams, [];
    ROTATE = "rotate", [IO_SEPARATE], [Read, Write, Read], RotateParams, [];
    ROTATE_IN_PLACE = "rotate", [IO_IN_PLACE], [Read, Write], RotateParams, [];
    CONVOLVE = "convolve", [ACTIVATION, SEQUENCES, STATES], [Read, Read, Read, Read, Write, Write], ConvParams, [];
    SCAN_PREPARE = "scan_prepare", [Lib::Reduce, GRID, SOFTPLUS], [Write, Read, Read, Read, Read, Write], PrepareParams, [];
    SCAN = "scan", [Lib::Reduce, GRID, SEQUENCES, STATES], [Read, Read, Read, Read, Write, Write, Read], ScanParams, [];
    SCAN_STEP = "scan_step", [Lib::Reduce, GRID, SOFTPLUS, ACTIVATION, SEQUENCES, STATES], [Read, Read, Read, Read, Read, Read, Write, Write], StepParams, [];
    MAMBA = "mamba", [Lib::Reduce, GRID, SOFTPLUS, SEQUENCES, STATES], [Read, Read, Read, Read, Read, Read, Write, Write], MambaParams, [];
    PREVIOUS = "previous", [SEQUENCES, STATES], [Read, Read, Write, Write], PreviousParams, [];
    TOKEN_SHIFT = "token_shift", [SEQUENCES], [Read, Read, Read, Read, Read, Write], ShiftParams, [];
    WKV4 = "wkv4", [SEQUENCES, STATES], [Read, Read, Read, Read, Read, Read, Write, Write], Wkv4Params, [];
    WKV_PREPARE = "wkv_prepare", [Lib::Reduce, GRID], [Read, Read, Read, Read, Read, Write], WkvPrepareParams, [];
    WKV = "wkv", [Lib::Reduce, GRID, SEQUENCES, STATES], [Read, Read, Read, Read, Write, Write], WkvParams, [];
    WKV_FINISH = "wkv_finish", [Lib::Reduce, GRID, ACTIVATION], [Write, Read, Read, Read, Read, Read, Read, Read], WkvFinishParams, [];
    ROUTE = "route", [Lib::Reduce, GRID, RANKS], [Read, Read, Write, Write], RouteParams, [];
    COMBINE = "combine", [], [Read, Read, Write], CombineExpertsParams, [];
    EXPERT_BIAS = "expert_bias", [], [Write, Read, Read], ExpertBiasParams, [];
    TOP_K = "top_k", [SAMPLERS], [Read, Read, Write], TopKParams, [];
    PENALIZE = "penalize", [EXACT], [Write, Read, Read, Read], PenalizeParams, [];
    PERTURB = "perturb", [RANDOM, SAMPLERS], [Write, Read], PerturbParams, [];
    WEIGH = "weigh", [SAMPLERS], [Read, Read, Write], WeighParams, [];
    MASK = "mask", [SAMPLERS], [Write, Read, Read], MaskParams, [];
    LOG_PROBABILITY = "log_probability", [SAMPLERS], [Read, Read, Read, Write], LogProbabilityParams, [];
    SAMPLE = "sample", [RANDOM, SAMPLERS], [Read, Read, Write, Write], SampleParams, [];
    TERNARY_GEMM_COOP = "gemm_coop", [LINEAR_PARAMS, COOP_ONE_MATRIX, COOP, COOP_SUMS_TERNARY, COOP_TERNARY, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q8_0_COOP = "gemm_coop", [LINEAR_PARAMS, COOP_ONE_MATRIX, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q8_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q4_0_COOP = "gemm_coop", [LINEAR_PARAMS, COOP_ONE_MATRIX, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q4_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q4_K_COOP = "gemm_coop", [LINEAR_PARAMS, COOP_ONE_MATRIX, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q6_K_COOP = "gemm_coop", [LINEAR_PARAMS, COOP_ONE_MATRIX, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q6_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q1_0_COOP = "gemm_coop", [LINEAR_PARAMS, COOP_ONE_MATRIX, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q1_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q2_0_COOP = "gemm_coop", [LINEAR_PARAMS, COOP_ONE_MATRIX, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q2_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    TERNARY_GEMM_COOP_FEW = "gemm_coop_columns", [LINEAR_PARAMS, COOP_EVERY_ROW, COOP, COOP_SUMS_TERNARY, COLUMNS_TERNARY, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q8_0_COOP_FEW = "gemm_coop_few", [LINEAR_PARAMS, COOP_EVERY_ROW, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q8_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q4_0_COOP_FEW = "gemm_coop_few", [LINEAR_PARAMS, COOP_EVERY_ROW, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q4_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q4_K_COOP_FEW = "gemm_coop_few", [LINEAR_PARAMS, COOP_EVERY_ROW, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q6_K_COOP_FEW = "gemm_coop_few", [LINEAR_PARAMS, COOP_EVERY_ROW, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q6_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q1_0_COOP_FEW = "gemm_coop_few", [LINEAR_PARAMS, COOP_EVERY_ROW, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q1_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GEMM_Q2_0_COOP_FEW = "gemm_coop_few", [LINEAR_PARAMS, COOP_EVERY_ROW, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q2_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Write], LinearParams, [Need::F16, Need::CooperativeMatrix];
    EXPERTS_TERNARY_COOP = "gemm_coop_columns", [LINEAR_PARAMS, COOP_ROUTED_ROWS, COOP, COOP_SUMS_TERNARY, COLUMNS_TERNARY, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [Need::F16, Need::CooperativeMatrix];
    EXPERTS_Q8_0_COOP = "gemm_coop_few", [LINEAR_PARAMS, COOP_ROUTED_ROWS, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q8_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [Need::F16, Need::CooperativeMatrix];
    EXPERTS_Q4_0_COOP = "gemm_coop_few", [LINEAR_PARAMS, COOP_ROUTED_ROWS, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q4_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [Need::F16, Need::CooperativeMatrix];
    EXPERTS_Q4_K_COOP = "gemm_coop_few", [LINEAR_PARAMS, COOP_ROUTED_ROWS, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q4_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [Need::F16, Need::CooperativeMatrix];
    EXPERTS_Q6_K_COOP = "gemm_coop_few", [LINEAR_PARAMS, COOP_ROUTED_ROWS, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q6_K, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [Need::F16, Need::CooperativeMatrix];
    EXPERTS_Q1_0_COOP = "gemm_coop_few", [LINEAR_PARAMS, COOP_ROUTED_ROWS, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q1_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [Need::F16, Need::CooperativeMatrix];
    EXPERTS_Q2_0_COOP = "gemm_coop_few", [LINEAR_PARAMS, COOP_ROUTED_ROWS, COOP, COOP_SUMS_BLOCKS, COOP_BLOCKS, BLOCK_PLANES, CODES_Q2_0, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [Need::F16, Need::CooperativeMatrix];
    GROUP_ROUTES = "group_routes", [], [Read, Write], GroupRoutesParams, [];
    TERNARY_GEMM_COOP_SUM = "gemm_coop_sum", [GRID, LINEAR_PARAMS, COOP_ONE_MATRIX, COOP, COOP_SUMS_TERNARY, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [Need::F16];
    GEMM_BLOCKS_COOP_SUM = "gemm_coop_sum", [GRID, LINEAR_PARAMS, COOP_ONE_MATRIX, COOP, BLOCK_PLANES, COOP_SUMS_BLOCKS, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write, Read], LinearParams, [Need::F16];
    HALVE = "halve", [HALF_RANGE], [Write, Read], HalveParams, [];
    DEQUANTIZE = "dequantize", [EXACT], [Read, Read, Write], DequantizeParams, [];
}
