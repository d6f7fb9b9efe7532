//! Where a forward pass is, told by the operations it consists of.
//!
//! [`Model::forward`](crate::Model) calls them in the same order for every family: blocks end with the
//! residual, a block begins with its norm, and its products follow in the order of the lists below.

/// How far a forward pass has come.
#[derive(Debug, Default)]
pub(super) struct Course {
    n_layers: usize,
    /// Blocks that have ended: two a layer.
    n_blocks: usize,
    /// Norms and products of this block so far.
    n_norms: usize,
    n_products: usize,
}

/// Names of a block's norm, its products and its end.
struct Block {
    norm: &'static str,
    products: &'static [&'static str],
    residual: &'static str,
}

const ATTENTION: Block = Block {
    norm: "attn_norm",
    products: &["q", "k", "v", "o"],
    residual: "attn_residual",
};

const FFN: Block = Block {
    norm: "ffn_norm",
    products: &["gate", "up", "down"],
    residual: "ffn_residual",
};

const OUTPUT: Block = Block {
    norm: "output_norm",
    products: &["logits"],
    residual: "",
};

impl Course {
    pub(super) fn set_layers(&mut self, n_layers: usize) {
        self.n_layers = n_layers;
    }

    /// A pass begins, with its embedding.
    pub(super) fn begin(&mut self) {
        *self = Course {
            n_layers: self.n_layers,
            ..Course::default()
        };
    }

    /// The layer; `None` before anything of the first is done, and behind the last.
    pub(super) fn layer(&self) -> Option<usize> {
        let begun = self.n_blocks > 0 || self.n_norms > 0;
        let layer = self.n_blocks / 2;
        (begun && layer < self.n_layers).then_some(layer)
    }

    fn block(&self) -> &'static Block {
        match self.n_blocks {
            n if n >= 2 * self.n_layers => &OUTPUT,
            n if n % 2 == 0 => &ATTENTION,
            _ => &FFN,
        }
    }

    fn next_product(&self) -> &'static str {
        self.block()
            .products
            .get(self.n_products)
            .unwrap_or(&"product")
    }

    /// The name of a norm: that of the block, or of the input of one product.
    pub(super) fn norm(&mut self) -> String {
        self.n_norms += 1;
        match self.n_norms {
            1 => self.block().norm.into(),
            _ => format!("{}_input_norm", self.next_product()),
        }
    }

    /// The name of a product.
    pub(super) fn product(&mut self) -> &'static str {
        let name = self.next_product();
        self.n_products += 1;
        name
    }

    /// The name of the residual, and whether a layer ends with it.
    pub(super) fn residual(&self) -> (&'static str, bool) {
        (self.block().residual, self.n_blocks % 2 == 1)
    }

    pub(super) fn end_block(&mut self) {
        (self.n_norms, self.n_products) = (0, 0);
        self.n_blocks += 1;
    }
}

/// The name of a norm of what an operation gave; `None` for heads of queries and keys.
pub(super) fn norm_behind(name: &str) -> Option<&'static str> {
    match name {
        "attention" => Some("attn_sub_norm"),
        "o" => Some("post_attn_norm"),
        "activation" => Some("ffn_sub_norm"),
        "down" => Some("post_ffn_norm"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_one_another() {
        let mut course = Course::default();
        course.set_layers(1);
        course.begin();
        assert_eq!(course.layer(), None);
        assert_eq!(course.norm(), "attn_norm");
        assert_eq!(course.layer(), Some(0));
        assert_eq!(course.norm(), "q_input_norm");
        let names: Vec<_> = (0..4).map(|_| course.product()).collect();
        assert_eq!(names, ["q", "k", "v", "o"]);
        assert_eq!(course.residual(), ("attn_residual", false));
        course.end_block();
        assert_eq!(course.norm(), "ffn_norm");
        assert_eq!(course.product(), "gate");
        assert_eq!(course.residual(), ("ffn_residual", true));
        course.end_block();
        assert_eq!(course.layer(), None);
        assert_eq!(
            (course.norm(), course.product()),
            ("output_norm".into(), "logits")
        );
    }
}
