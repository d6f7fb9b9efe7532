//! The names of the tensors of `qmodel.tensors`, which only their order tells.

use super::{ArchType, BundleError};
use crate::names::{EMBEDDINGS, HEAD, OUTPUT_NORM, module};

/// A part of a layer: a vector of factors, or a linear layer, after which a bias may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Norm(&'static str),
    Linear(&'static str),
}

use Part::{Linear, Norm};

const BITNET: [Part; 11] = [
    Norm(module::INPUT_NORM),
    Norm(module::ATTN_SUB_NORM),
    Linear(module::K),
    Linear(module::V),
    Linear(module::Q),
    Linear(module::O),
    Norm(module::POST_ATTENTION_NORM),
    Linear(module::GATE),
    Linear(module::UP),
    Norm(module::FFN_SUB_NORM),
    Linear(module::DOWN),
];

const LLAMA: [Part; 9] = [
    Norm(module::INPUT_NORM),
    Linear(module::K),
    Linear(module::V),
    Linear(module::Q),
    Linear(module::O),
    Norm(module::POST_ATTENTION_NORM),
    Linear(module::GATE),
    Linear(module::UP),
    Linear(module::DOWN),
];

const QWEN3: [Part; 11] = [
    Norm(module::INPUT_NORM),
    Linear(module::K),
    Linear(module::V),
    Linear(module::Q),
    Norm(module::Q_NORM),
    Norm(module::K_NORM),
    Linear(module::O),
    Norm(module::POST_ATTENTION_NORM),
    Linear(module::GATE),
    Linear(module::UP),
    Linear(module::DOWN),
];

/// The parts of a layer of `arch` in their order.
fn layer_parts(arch: ArchType) -> Option<&'static [Part]> {
    match arch {
        ArchType::BitNet => Some(&BITNET),
        ArchType::Llama => Some(&LLAMA),
        ArchType::Qwen3 | ArchType::Bonsai | ArchType::BonsaiTernary => Some(&QWEN3),
        ArchType::Unknown | ArchType::Qwen35 | ArchType::BonsaiImage => None,
    }
}

/// The parts of a layer of `arch` by their paths, in the order of its tensors; a bias comes directly
/// after its weight.
///
/// # Errors
///
/// [`BundleError::UnknownOrder`] of architectures that are known by name only.
pub fn layer_order(
    arch: ArchType,
) -> Result<impl ExactSizeIterator<Item = &'static str>, BundleError> {
    let parts = layer_parts(arch).ok_or(BundleError::UnknownOrder { arch })?;
    Ok(parts.iter().map(|part| match *part {
        Norm(path) | Linear(path) => path,
    }))
}

/// What the tensors of a file are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// Layers of the model.
    pub n_layers: usize,
    /// A Hugging Face name for each tensor.
    pub names: Vec<String>,
}

/// The Hugging Face names of tensors with these shapes, which are rows and columns; a vector has one
/// column.
///
/// First come the embedding table, the output head unless the table is `tied` to it, and the last norm;
/// then the parts of each layer. A head or a linear layer may have a bias, which comes after its weight
/// (that of the head also before it): it is recognised by one vector more than the norms up to the next
/// matrix. Every sequence has one interpretation or none.
///
/// ```
/// use sterna_format::bundle::{ArchType, tensor_names};
///
/// let mut shapes = vec![(32, 8), (8, 1)];
/// shapes.extend([(8, 1), (4, 8), (4, 8), (8, 8), (8, 8), (8, 1), (16, 8), (16, 8), (8, 16)]);
/// let names = tensor_names(ArchType::Llama, true, Some(1), &shapes)?;
/// assert_eq!(names.names[3], "model.layers.0.self_attn.k_proj.weight");
/// # Ok::<(), sterna_format::bundle::BundleError>(())
/// ```
///
/// # Errors
///
/// [`BundleError::UnknownOrder`], [`BundleError::Order`] at the first tensor that doesn't fit, and
/// [`BundleError::Layers`] if there aren't `n_layers` layers.
pub fn tensor_names(
    arch: ArchType,
    tied: bool,
    n_layers: Option<usize>,
    shapes: &[(u32, u32)],
) -> Result<Names, BundleError> {
    let parts = layer_parts(arch).ok_or(BundleError::UnknownOrder { arch })?;
    let leading_norms = parts.iter().take_while(|p| matches!(p, Norm(_))).count();
    let mut naming = Naming {
        shapes,
        names: Vec::with_capacity(shapes.len()),
    };
    naming.matrix(EMBEDDINGS)?;
    let last_norm_and_layer = |naming: &Naming<'_>| 1 + naming.norms_of_next(leading_norms);
    if !tied {
        // Nothing orders the two tensors of the head among each other.
        if naming.vectors() == 1 && naming.matrix_at(1) {
            naming.vector("lm_head.bias")?;
            naming.matrix(HEAD)?;
        } else {
            naming.matrix(HEAD)?;
            naming.bias("lm_head", last_norm_and_layer(&naming))?;
        }
    } else {
        naming.bias("lm_head", last_norm_and_layer(&naming))?;
    }
    naming.vector(OUTPUT_NORM)?;

    let mut found = 0;
    while naming.names.len() < shapes.len() {
        let layer = format!("model.layers.{found}");
        for (i, part) in parts.iter().enumerate() {
            let path = match part {
                Norm(path) => {
                    naming.vector(&format!("{layer}.{path}.weight"))?;
                    continue;
                }
                Linear(path) => format!("{layer}.{path}"),
            };
            naming.matrix(&format!("{path}.weight"))?;
            let rest = &parts[i + 1..];
            let norms = rest.iter().take_while(|p| matches!(p, Norm(_))).count();
            let norms = match rest.len() == norms {
                true => norms + naming.norms_of_next(leading_norms),
                false => norms,
            };
            naming.bias(&path, norms)?;
        }
        found += 1;
    }
    match n_layers {
        Some(expected) if expected != found => Err(BundleError::Layers {
            expected,
            found,
            per_layer: parts.len(),
        }),
        _ => Ok(Names {
            n_layers: found,
            names: naming.names,
        }),
    }
}

/// Tensors of which the first have names.
struct Naming<'a> {
    shapes: &'a [(u32, u32)],
    names: Vec<String>,
}

impl Naming<'_> {
    fn left(&self) -> &[(u32, u32)] {
        &self.shapes[self.names.len()..]
    }

    /// Whether the tensor `ahead` of the next is a matrix.
    fn matrix_at(&self, ahead: usize) -> bool {
        self.left().get(ahead).is_some_and(|&(_, cols)| cols != 1)
    }

    /// Vectors up to the next matrix or the end.
    fn vectors(&self) -> usize {
        let left = self.left().iter();
        left.take_while(|&&(_, cols)| cols == 1).count()
    }

    /// The norms that the next layer begins with, `leading` or none if there is no layer any more.
    fn norms_of_next(&self, leading: usize) -> usize {
        match self.matrix_at(self.vectors()) {
            true => leading,
            false => 0,
        }
    }

    /// Names the next tensor the bias of `path` if there is one vector more than `norms` up to the next
    /// matrix.
    fn bias(&mut self, path: &str, norms: usize) -> Result<(), BundleError> {
        match self.vectors() == norms + 1 {
            true => self.vector(&format!("{path}.bias")),
            false => Ok(()),
        }
    }

    fn matrix(&mut self, name: &str) -> Result<(), BundleError> {
        self.name(name, true)
    }

    fn vector(&mut self, name: &str) -> Result<(), BundleError> {
        self.name(name, false)
    }

    fn name(&mut self, name: &str, is_matrix: bool) -> Result<(), BundleError> {
        let found = match self.left().first() {
            Some(&(_, cols)) if (cols != 1) == is_matrix => {
                self.names.push(name.to_owned());
                return Ok(());
            }
            Some((rows, 1)) => format!("a vector of {rows}"),
            Some((rows, cols)) => format!("a matrix of {rows} times {cols}"),
            None => "the end of the tensors".to_owned(),
        };
        Err(BundleError::Order {
            index: self.names.len(),
            name: name.to_owned(),
            expected: if is_matrix { "matrix" } else { "vector" },
            found,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARCHS: [ArchType; 5] = [
        ArchType::BitNet,
        ArchType::Llama,
        ArchType::Qwen3,
        ArchType::Bonsai,
        ArchType::BonsaiTernary,
    ];

    /// Names of a model whose linear layers with an index in `biases` have one; bit 15 is the head.
    fn names(arch: ArchType, tied: bool, n_layers: usize, biases: u32) -> Vec<String> {
        let mut names = vec!["model.embed_tokens.weight".to_owned()];
        if !tied {
            names.push("lm_head.weight".into());
        }
        if biases >> 15 & 1 == 1 {
            names.push("lm_head.bias".into());
        }
        names.push("model.norm.weight".into());
        for layer in 0..n_layers {
            let mut linears = 0;
            for path in layer_order(arch).unwrap() {
                names.push(format!("model.layers.{layer}.{path}.weight"));
                if path.ends_with("_proj") {
                    if biases >> linears & 1 == 1 {
                        names.push(format!("model.layers.{layer}.{path}.bias"));
                    }
                    linears += 1;
                }
            }
        }
        names
    }

    fn shapes(names: &[String]) -> Vec<(u32, u32)> {
        let is_matrix = |name: &str| {
            let linear = name.contains("_proj") || name.contains("embed") || name.contains("head");
            linear && name.ends_with("weight")
        };
        let shape = |name: &String| (8, if is_matrix(name) { 4 } else { 1 });
        names.iter().map(shape).collect()
    }

    #[test]
    fn every_choice_of_biases_has_one_reading() {
        for arch in ARCHS {
            for tied in [false, true] {
                for n_layers in 0..3 {
                    for biases in (0..128).chain([1 << 15, 0xffff]) {
                        let names = names(arch, tied, n_layers, biases);
                        let read = tensor_names(arch, tied, Some(n_layers), &shapes(&names));
                        assert_eq!(read.unwrap().names, names, "{arch} {tied} {biases:x}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_bias_of_a_head_may_stand_before_it() {
        let mut names = names(ArchType::BitNet, false, 1, 1 << 15);
        names.swap(1, 2);
        let read = tensor_names(ArchType::BitNet, false, None, &shapes(&names)).unwrap();
        assert_eq!((read.names, read.n_layers), (names, 1));
    }

    #[test]
    fn a_tensor_more_or_less_is_an_error() {
        for arch in ARCHS {
            let shapes = shapes(&names(arch, true, 2, 0));
            for i in 0..shapes.len() {
                let mut less = shapes.clone();
                less.remove(i);
                let read = tensor_names(arch, true, Some(2), &less);
                assert!(read.is_err(), "{arch} without {i}");
                let mut more = shapes.clone();
                more.insert(i, (4, 4));
                assert!(tensor_names(arch, true, Some(2), &more).is_err());
            }
        }
    }

    #[test]
    fn errors_say_which_tensor_was_due() {
        let read = |tied, n_layers, shapes: &[(u32, u32)]| {
            let read = tensor_names(ArchType::Llama, tied, n_layers, shapes);
            read.unwrap_err().to_string()
        };
        let whole = shapes(&names(ArchType::Llama, true, 1, 0));
        assert_eq!(
            read(false, None, &whole),
            "tensor 1: expected `lm_head.weight`, a matrix, found a vector of 8"
        );
        assert_eq!(
            read(true, None, &whole[..10]),
            "tensor 10: expected `model.layers.0.mlp.down_proj.weight`, a matrix, \
             found the end of the tensors"
        );
        assert_eq!(
            read(true, Some(3), &whole),
            "expected the tensors of 3 layers, at least 9 each, found those of 1"
        );
        assert_eq!(
            tensor_names(ArchType::Qwen35, true, None, &whole)
                .unwrap_err()
                .to_string(),
            "architecture qwen35: the order of its tensors isn't known"
        );
    }
}
