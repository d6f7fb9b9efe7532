//! Every variant of every shader, for both compilers, without a GPU.

use naga::valid::{Capabilities, ValidationFlags, Validator};
use sterna_gpu::Features;
use sterna_gpu::shader::{ALL, Need, Shader, Target};

fn variants() -> impl Iterator<Item = Features> {
    (0..8).map(|bits| Features {
        subgroups: bits & 1 != 0,
        dot4: bits & 2 != 0,
        immediates: bits & 4 != 0,
        ..Features::ALL
    })
}

fn validate(shader: &Shader, text: &str) {
    let capabilities = Capabilities::IMMEDIATES
        | Capabilities::SUBGROUP
        | Capabilities::SHADER_FLOAT16
        | Capabilities::SHADER_FLOAT16_IN_FLOAT32
        | Capabilities::COOPERATIVE_MATRIX;
    let module = naga::front::wgsl::parse_str(text)
        .unwrap_or_else(|error| panic!("{}: {}", shader.name, error.emit_to_string(text)));
    let info = Validator::new(ValidationFlags::all(), capabilities)
        .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
        .subgroup_operations(naga::valid::SubgroupOperationSet::all())
        .validate(&module)
        .unwrap_or_else(|error| panic!("{}: {}", shader.name, error.emit_to_string(text)));
    // With its default constants, to SPIR-V.
    let constants = naga::back::PipelineConstants::default();
    let entry = Some((naga::ShaderStage::Compute, "main"));
    let (module, info) =
        naga::back::pipeline_constants::process_overrides(&module, &info, entry, &constants)
            .unwrap();
    let options = naga::back::spv::Options {
        lang_version: (1, 3),
        ..Default::default()
    };
    let words = naga::back::spv::write_vec(&module, &info, &options, None);
    assert!(
        words.is_ok_and(|words| words.len() > 100),
        "{}",
        shader.name
    );
}

#[test]
fn every_variant_is_valid_wgsl() {
    for shader in ALL {
        for features in variants() {
            let native = shader.assemble(Target::Native, features);
            validate(shader, &native);
            assert_eq!(native.contains("var<immediate>"), features.immediates);
            // naga takes no `enable subgroups`, and needs none.
            let browser = shader.assemble(Target::Browser, features);
            validate(shader, &browser.replace("enable subgroups;\n", ""));
            assert_eq!(browser.contains("var<immediate>"), features.immediates);
            let uses_subgroups = browser.contains("subgroup_");
            assert_eq!(browser.contains("enable subgroups;"), uses_subgroups);
        }
    }
}

#[test]
fn cooperative_matrices_can_be_emulated() {
    let features = Features {
        cooperative_matrix: false,
        emulated_matrix: true,
        ..Features::ALL
    };
    let with_matrices = |shader: &&&Shader| shader.needs.contains(&Need::CooperativeMatrix);
    let mut n = 0;
    for shader in ALL.iter().filter(with_matrices) {
        assert!(shader.runs_with(features));
        let text = shader.assemble(Target::Native, features);
        assert!(!text.contains("coop_mat"), "{}", shader.name);
        validate(shader, &text);
        n += 1;
    }
    assert!(n > 20, "{n}");
}

#[test]
fn every_buffer_is_declared_as_the_table_says() {
    for shader in ALL {
        let text = shader.assemble(Target::Native, Features::ALL);
        let module = naga::front::wgsl::parse_str(&text).unwrap();
        let mut n_found = 0;
        for (_, variable) in module.global_variables.iter() {
            if let Some(binding) = &variable.binding {
                let naga::AddressSpace::Storage { access } = variable.space else {
                    panic!("{}: a binding that isn't a storage buffer", shader.name);
                };
                let writes = access.contains(naga::StorageAccess::STORE);
                let expected = shader.bindings[binding.binding as usize];
                let is_write = expected == sterna_gpu::shader::Access::Write;
                assert_eq!((binding.group, writes), (0, is_write), "{}", shader.name);
                n_found += 1;
            }
        }
        assert_eq!(n_found, shader.bindings.len(), "{}", shader.name);
    }
}

#[test]
fn parameters_are_those_of_the_wgsl_field_by_field() {
    for shader in ALL {
        for features in [Features::ALL, Features::NONE] {
            let text = shader.assemble(Target::Native, features);
            let module = naga::front::wgsl::parse_str(&text).unwrap();
            let mut variables = module.global_variables.iter();
            let (_, variable) = variables
                .find(|(_, variable)| variable.name.as_deref() == Some("params"))
                .unwrap();
            let inner = &module.types[variable.ty].inner;
            let naga::TypeInner::Struct { members, .. } = inner else {
                panic!("{}: parameters that are no struct", shader.name);
            };
            let found: Vec<_> = members
                .iter()
                .map(|member| {
                    let ty = match module.types[member.ty].inner {
                        naga::TypeInner::Scalar(naga::Scalar::U32) => "u32",
                        naga::TypeInner::Scalar(naga::Scalar::F32) => "f32",
                        ref other => panic!("{}: {other:?}", shader.name),
                    };
                    (member.name.as_deref().unwrap(), member.offset as usize, ty)
                })
                .collect();
            let expected = shader.params.iter().map(|p| (p.name, p.offset, p.ty));
            assert_eq!(found, expected.collect::<Vec<_>>(), "{}", shader.name);
            let size = inner.size(module.to_ctx());
            assert_eq!(size, shader.params_bytes(), "{}", shader.name);
        }
    }
}

#[test]
fn what_workgroups_share_is_apart_from_what_they_do_not() {
    // Browsers' compilers treat a struct as non-uniform if one of its members is, and refuse barriers in
    // non-uniform control flow.
    for shader in ALL {
        for features in variants() {
            let text = shader.assemble(Target::Browser, features);
            let text = text.replace("enable subgroups;\n", "");
            let module = naga::front::wgsl::parse_str(&text).unwrap();
            for argument in &module.entry_points[0].function.arguments {
                let naga::TypeInner::Struct { members, .. } = &module.types[argument.ty].inner
                else {
                    continue;
                };
                let is_shared = members.iter().map(|member| {
                    let of_group = [naga::BuiltIn::WorkGroupId, naga::BuiltIn::NumWorkGroups];
                    matches!(member.binding, Some(naga::Binding::BuiltIn(it)) if of_group.contains(&it))
                });
                let is_shared: Vec<bool> = is_shared.collect();
                let are_alike = is_shared.iter().all(|shared| *shared == is_shared[0]);
                assert!(are_alike, "{}: {:?}", shader.name, argument.name);
            }
        }
    }
}

#[test]
fn variables_of_loops_say_how_they_begin() {
    // Without an initial value a variable is zero each time that its block is entered, by WGSL. Chromium's
    // compiler for Vulkan leaves the last turn's value in it.
    for shader in ALL {
        let text = shader.assemble(Target::Browser, Features::ALL);
        for line in text.lines() {
            let inner = line.strip_prefix("        ").map(str::trim_start);
            let declared = inner.and_then(|line| line.strip_prefix("var "));
            let is_initialised = declared.is_none_or(|rest| rest.contains('='));
            assert!(is_initialised, "{}: {line}", shader.name);
        }
    }
}

#[test]
fn what_no_variant_can_do_without() {
    for shader in ALL {
        assert!(shader.runs_with(Features::ALL), "{}", shader.name);
        assert_eq!(shader.runs_with(Features::NONE), shader.needs.is_empty());
    }
}
