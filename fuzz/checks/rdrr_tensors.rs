//! External tensor maps of packages, and the names in them.

use sterna_format::rdrr::{TensorMap, groups, lora};

/// Panics if a promise of the parser is broken.
pub(crate) fn check(data: &[u8]) {
    let Ok(map) = TensorMap::parse(data) else {
        return;
    };
    for tensor in map.iter() {
        assert!(!tensor.pieces().is_empty());
        assert_eq!(
            tensor.pieces().iter().map(|p| p.size).sum::<u64>(),
            tensor.size
        );
        assert_eq!(tensor.dtype.known().is_some(), tensor.packing().is_some());
        let n = |shape: &[usize]| shape.iter().product::<usize>();
        if tensor.dtype.known().is_some() {
            assert_eq!(n(&tensor.shape), n(&tensor.logical_shape()));
        }
        for model_type in [
            "transformer",
            "mamba",
            "rwkv",
            "mixtral",
            "deepseek",
            "jamba",
        ] {
            let group = groups::group_of(&tensor.name, model_type);
            assert_eq!(group.to_string().parse(), Ok(group));
        }
        let _ = groups::role_of(&tensor.name);
        if let Some(name) = lora::parse_name(&tensor.name) {
            assert_eq!(lora::parse_name(&name.to_tensor_name()), Some(name));
        }
    }
    let text = map.to_json();
    let again = TensorMap::parse(&text).expect("what was written");
    assert_eq!(again, map);
    assert_eq!(again.to_json(), text);
}
