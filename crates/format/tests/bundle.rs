//! The files of engine bundles: what is written is read back, and bad files are refused with a reason.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use sterna_format::bundle::{
    Action, ArchType, BundleError, LoraBlock, LoraFile, LoraPair, LoraSource, LoraTarget, Manifest,
    ManifestTensor, MatrixSource, ModelFacts, Section, ShardRange, SourceType, StoredMatrix,
    TensorFile, TensorForm,
};

fn arch() -> impl Strategy<Value = ArchType> {
    select(ArchType::ALL.to_vec())
}

/// Shards of every manifest here.
const N_SHARDS: u16 = 3;

fn range(size: u64) -> impl Strategy<Value = ShardRange> {
    (0..N_SHARDS, 0..=u64::MAX - size).prop_map(move |(shard, offset)| ShardRange {
        shard,
        offset,
        size,
    })
}

/// An action of `arch` and a type that it takes.
fn action(arch: ArchType) -> impl Strategy<Value = (Action, SourceType)> {
    let all = Action::ALL
        .into_iter()
        .flat_map(|action| SourceType::ALL.map(|source| (action, source)));
    let allowed = |&(action, source): &(Action, SourceType)| {
        action.code(arch).is_some() && action.stored_type(source).is_some()
    };
    select(all.filter(allowed).collect::<Vec<_>>())
}

fn tensor(arch: ArchType) -> impl Strategy<Value = ManifestTensor> {
    let dims = (1..5000_u32, 1..5000_u32, 0..200_u32, 0..200_u32);
    (action(arch), dims).prop_flat_map(|((action, dtype), (rows, cols, more_rows, more_cols))| {
        let size = u64::from(rows) * u64::from(cols) * dtype.dtype().block_bytes() as u64;
        let scale = option::of(select(vec![2, 4]).prop_flat_map(range));
        (range(size), scale).prop_map(move |(data, scale)| ManifestTensor {
            action,
            dtype,
            rows,
            cols,
            padded_rows: rows + more_rows,
            padded_cols: cols + more_cols,
            data,
            scale,
        })
    })
}

fn floats() -> impl Strategy<Value = SourceType> {
    select(vec![SourceType::F32, SourceType::F16, SourceType::BF16])
}

fn matrix(rows: u32, cols: u32) -> impl Strategy<Value = MatrixSource> {
    floats().prop_flat_map(move |dtype| {
        let size = u64::from(rows) * u64::from(cols) * dtype.dtype().block_bytes() as u64;
        range(size).prop_map(move |data| MatrixSource {
            dtype,
            rows,
            cols,
            data,
        })
    })
}

fn lora_block() -> impl Strategy<Value = LoraBlock> {
    let pair = (1..20_u32, 1..300_u32, 1..300_u32)
        .prop_flat_map(|(rank, n, k)| (matrix(rank, k), matrix(n, rank)));
    let pairs = vec(vec(option::of(pair), 7), 0..4);
    (pairs, -1e9..1e9).prop_map(|(layers, scale)| LoraBlock {
        n_layers: layers.len() as u32,
        scale,
        pairs: (layers.into_iter().enumerate())
            .flat_map(|(layer, pairs)| {
                let places = LoraTarget::ALL.into_iter().zip(pairs);
                places.filter_map(move |(target, pair)| {
                    pair.map(|(a, b)| LoraSource {
                        layer: layer as u32,
                        target,
                        a,
                        b,
                    })
                })
            })
            .collect(),
    })
}

fn manifest() -> impl Strategy<Value = (ArchType, Manifest)> {
    (arch(), 0..6_usize).prop_flat_map(|(arch, n)| {
        let section = (1..=6_u8, 0..=n, 0..=n).prop_map(|(kind, a, b)| Section {
            kind,
            first: a.min(b) as u32,
            len: a.abs_diff(b) as u32,
        });
        let parts = (
            vec(".{0,20}", usize::from(N_SHARDS)),
            vec(tensor(arch), n),
            option::of(vec(section, 0..4)),
            option::of(lora_block()),
        );
        parts.prop_map(move |(shards, tensors, sections, lora)| {
            let manifest = Manifest {
                shards,
                tensors,
                sections,
                lora,
            };
            (arch, manifest)
        })
    })
}

fn facts(arch: ArchType) -> impl Strategy<Value = ModelFacts> {
    let dims = (any::<u16>(), any::<u16>(), any::<u16>(), any::<u16>());
    (any::<bool>(), dims, 0.0..1.0).prop_map(move |(tied_embeddings, dims, norm_eps)| ModelFacts {
        arch,
        tied_embeddings,
        hidden_dim: u32::from(dims.0) + u32::from(dims.1),
        intermediate_dim: u32::from(dims.2) + u32::from(dims.3),
        hidden_dim_orig: dims.0.into(),
        intermediate_dim_orig: dims.2.into(),
        norm_eps,
    })
}

fn tensor_file() -> impl Strategy<Value = TensorFile> {
    arch().prop_flat_map(|arch| {
        let form = tensor(arch).prop_map(|tensor| TensorForm {
            action: tensor.action,
            dtype: tensor.action.stored_type(tensor.dtype).unwrap(),
            rows: tensor.rows,
            cols: tensor.cols,
            padded_rows: tensor.padded_rows,
            padded_cols: tensor.padded_cols,
        });
        let parts = (facts(arch), vec(form, 0..6));
        parts.prop_map(|(facts, forms)| TensorFile::layout(facts, &forms).unwrap())
    })
}

fn lora_file() -> impl Strategy<Value = LoraFile> {
    lora_block().prop_map(|block| {
        let stored = |matrix: MatrixSource| StoredMatrix {
            dtype: matrix.dtype.dtype(),
            rows: matrix.rows,
            cols: matrix.cols,
            offset: 0,
            size: 0,
        };
        let pairs = block.pairs.into_iter().map(|pair| LoraPair {
            layer: pair.layer,
            target: pair.target,
            a: stored(pair.a),
            b: stored(pair.b),
        });
        LoraFile::layout(block.n_layers, block.scale, pairs.collect()).unwrap()
    })
}

/// Parses every prefix of a header: too few bytes are an error, and one that says so.
fn check_prefixes<T>(
    header: &[u8],
    needed: usize,
    file_len: u64,
    parse: impl Fn(&[u8], u64) -> Result<T, BundleError>,
) {
    for n in 0..needed {
        match parse(&header[..n], file_len) {
            Err(BundleError::NeedMore { at_least }) => assert!(at_least > n as u64),
            Err(other) => panic!("{n}: {other}"),
            Ok(_) => panic!("{n} bytes were enough"),
        }
        assert!(parse(&header[..n], n as u64).is_err());
    }
    assert!(parse(&header[..needed], file_len).is_ok());
}

/// Reads a manifest field by field, as the table in the description of the engine protocol lists them.
struct ByTable<'a>(&'a [u8]);

impl ByTable<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (now, later) = self.0.split_at(N);
        self.0 = later;
        now.try_into().unwrap()
    }

    fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    fn range(&mut self) -> (u16, u64, u64) {
        (self.u16(), self.u64(), self.u64())
    }

    fn expect(&mut self, arch: ArchType, manifest: &Manifest) {
        let range = |range: &ShardRange| (range.shard, range.offset, range.size);
        assert_eq!(usize::from(self.u16()), manifest.shards.len());
        for shard in &manifest.shards {
            let len = usize::from(self.u16());
            let (path, later) = self.0.split_at(len);
            assert_eq!(path, shard.as_bytes());
            self.0 = later;
        }
        assert_eq!(self.u32() as usize, manifest.tensors.len());
        for tensor in &manifest.tensors {
            let before = self.0.len();
            assert_eq!(Some(self.u8()), tensor.action.code(arch));
            assert_eq!(self.u8(), tensor.dtype.code());
            assert_eq!((self.u32(), self.u32()), (tensor.rows, tensor.cols));
            let padded = (tensor.padded_rows, tensor.padded_cols);
            assert_eq!((self.u32(), self.u32()), padded);
            assert_eq!(self.range(), range(&tensor.data));
            assert_eq!(self.u8(), u8::from(tensor.scale.is_some()));
            let scale = tensor.scale.as_ref().map_or((0, 0, 0), range);
            assert_eq!(self.range(), scale);
            assert_eq!(before - self.0.len(), 55);
        }
        if let Some(sections) = &manifest.sections {
            assert_eq!(self.u32() as usize, sections.len());
            for section in sections {
                assert_eq!(self.u8(), section.kind);
                assert_eq!((self.u32(), self.u32()), (section.first, section.len));
            }
        }
        if let Some(lora) = &manifest.lora {
            assert_eq!((self.u32(), self.u32()), (lora.n_layers, 7));
            assert_eq!(f64::from_le_bytes(self.take()), lora.scale);
            for place in 0..lora.n_layers * 7 {
                let target = LoraTarget::ALL[place as usize % 7];
                let mut pairs = lora.pairs.iter();
                let pair = pairs.find(|pair| (pair.layer, pair.target) == (place / 7, target));
                assert_eq!(self.u8(), u8::from(pair.is_some()));
                for matrix in pair.iter().flat_map(|pair| [&pair.a, &pair.b]) {
                    assert_eq!(self.u8(), matrix.dtype.code());
                    assert_eq!((self.u32(), self.u32()), (matrix.rows, matrix.cols));
                    assert_eq!(self.range(), range(&matrix.data));
                }
            }
        }
        assert!(self.0.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn manifests_are_written_as_the_table_says((arch, manifest) in manifest()) {
        let bytes = manifest.to_bytes(arch).unwrap();
        ByTable(&bytes).expect(arch, &manifest);
    }

    #[test]
    fn manifests_are_read_as_they_are_written((arch, manifest) in manifest()) {
        let bytes = manifest.to_bytes(arch).unwrap();
        prop_assert_eq!(&Manifest::parse(&bytes, arch).unwrap(), &manifest);
        for n in 0..bytes.len() {
            // The end of the tensors is the end of a manifest as well, and so is that of the sections.
            if let Ok(less) = Manifest::parse(&bytes[..n], arch) {
                prop_assert!(less.lora.is_none() && manifest.lora.is_some() || less.sections.is_none());
            }
        }
    }

    #[test]
    fn tensor_files_are_read_as_they_are_written(file in tensor_file()) {
        let header = file.header();
        prop_assert_eq!(&TensorFile::parse(&header, file.file_len()).unwrap(), &file);
        let longer = TensorFile::parse(&header, file.file_len() + 1).unwrap_err();
        prop_assert!(longer.to_string().starts_with("1 bytes after the last part"), "{}", longer);
        let needed = 64 + 40 * file.tensors.len();
        check_prefixes(&header, needed, file.file_len(), TensorFile::parse);
    }

    #[test]
    fn lora_files_are_read_as_they_are_written(file in lora_file()) {
        let header = file.header();
        prop_assert_eq!(&LoraFile::parse(&header, file.file_len()).unwrap(), &file);
        check_prefixes(&header, header.len(), file.file_len(), LoraFile::parse);
    }

    #[test]
    fn no_mutation_makes_a_parser_panic(
        (arch, manifest) in manifest(),
        file in tensor_file(),
        lora in lora_file(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mutated = |mut bytes: Vec<u8>| {
            for (at, byte) in &changes {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            bytes
        };
        let bytes = mutated(manifest.to_bytes(arch).unwrap());
        for arch in ArchType::ALL {
            if let Ok(read) = Manifest::parse(&bytes, arch) {
                read.to_bytes(arch).unwrap();
            }
        }
        let _ = TensorFile::parse(&mutated(file.header()), file.file_len());
        let _ = LoraFile::parse(&mutated(lora.header()), lora.file_len());
    }
}

fn raw_tensor() -> ManifestTensor {
    ManifestTensor {
        action: Action::Raw,
        dtype: SourceType::BF16,
        rows: 4,
        cols: 8,
        padded_rows: 4,
        padded_cols: 8,
        data: ShardRange {
            shard: 0,
            offset: 10,
            size: 64,
        },
        scale: None,
    }
}

fn refusal(change: impl FnOnce(&mut Manifest)) -> String {
    let mut manifest = Manifest {
        shards: vec!["a".into()],
        tensors: vec![raw_tensor()],
        sections: Some(vec![]),
        lora: None,
    };
    change(&mut manifest);
    manifest.to_bytes(ArchType::Llama).unwrap_err().to_string()
}

#[test]
fn writing_refuses_what_reading_would() {
    for (message, change) in [
        (
            "tensor 0: data: expected a shard below 1, found 1",
            (|m| m.tensors[0].data.shard = 1) as fn(&mut Manifest),
        ),
        (
            "tensor 0: data: expected 64 bytes for 4 times 8 of BF16, found 63",
            |m| m.tensors[0].data.size = 63,
        ),
        (
            "tensor 0: data: expected bytes of a file, found 64 from 18446744073709551615 on",
            |m| m.tensors[0].data.offset = u64::MAX,
        ),
        ("tensor 0: rows: expected at least 1, found 0", |m| {
            m.tensors[0].rows = 0;
        }),
        (
            "tensor 0: padded columns: expected at least 8, found 7",
            |m| m.tensors[0].padded_cols = 7,
        ),
        (
            "tensor 0: element type: expected F32, F16 or BF16, with action BF16_RAW, found U8",
            |m| m.tensors[0].dtype = SourceType::U8,
        ),
        (
            "tensor 0: element type: expected I8 or U8, with action REPACK_TERNARY, found BF16",
            |m| m.tensors[0].action = Action::RepackTernary,
        ),
        (
            "tensor 0: action: expected one of architecture llama, found Q4_0",
            |m| m.tensors[0].action = Action::Q4_0,
        ),
        (
            "tensor 0: size of the scale: expected one float of 2 or 4 bytes, found 8",
            |m| {
                m.tensors[0].scale = Some(ShardRange {
                    shard: 0,
                    offset: 0,
                    size: 8,
                });
            },
        ),
        (
            "tensor 0: data: expected a size that fits 64 bits, with 4294967295 times 4294967295 of BF16, found 64",
            |m| {
                let tensor = &mut m.tensors[0];
                (tensor.rows, tensor.cols) = (u32::MAX, u32::MAX);
                (tensor.padded_rows, tensor.padded_cols) = (u32::MAX, u32::MAX);
            },
        ),
        (
            "section 0: tensors: expected some of the 1 there are, found 1 to 2",
            |m| {
                m.sections = Some(vec![Section {
                    kind: Section::TEXT,
                    first: 1,
                    len: 1,
                }]);
            },
        ),
        (
            "section 0: kind: expected a number from 1 to 6, found 7",
            |m| {
                m.sections = Some(vec![Section {
                    kind: 7,
                    first: 0,
                    len: 1,
                }]);
            },
        ),
        (
            "the LoRA block: scale: expected a finite number, found inf",
            |m| {
                m.lora = Some(LoraBlock {
                    n_layers: 1,
                    scale: f64::INFINITY,
                    pairs: vec![],
                });
            },
        ),
        (
            "shard 0: length of the path: expected a number of 16 bits, found 65536",
            |m| m.shards[0] = "x".repeat(65536),
        ),
    ] {
        assert_eq!(refusal(change), message);
    }
}

#[test]
fn bad_manifests_say_what_and_where() {
    let parse = |bytes: &[u8]| {
        let read = Manifest::parse(bytes, ArchType::Llama);
        read.unwrap_err().to_string()
    };
    let start = [&[1, 0, 1, 0, b'a'][..], &1_u32.to_le_bytes()].concat();
    let entry = |change: &[(usize, u8)]| {
        let mut bytes = start.clone();
        let mut entry = [0; 55];
        (entry[1], entry[2], entry[6]) = (2, 1, 1);
        (entry[10], entry[14], entry[28]) = (1, 1, 2);
        for &(at, byte) in change {
            entry[at] = byte;
        }
        bytes.extend_from_slice(&entry);
        bytes
    };
    assert!(Manifest::parse(&entry(&[]), ArchType::Llama).is_ok());
    for (bytes, message) in [
        (
            vec![],
            "the file ends in the header: 2 bytes needed, 0 left",
        ),
        (
            vec![0xff, 0xff, 0, 0],
            "the file ends in the header: 131070 bytes needed, 2 left",
        ),
        (
            vec![1, 0, 2, 0, b'a', 0xff],
            "shard 0: path: expected UTF-8 text, found other bytes after the first 1",
        ),
        (
            [&[0; 2][..], &[0xff; 4]].concat(),
            "the list of tensors: length: expected at most 65536, found 4294967295",
        ),
        (
            [&[0; 2][..], &[0, 0, 1, 0]].concat(),
            "the file ends in the list of tensors: 3604480 bytes needed, 0 left",
        ),
        (
            entry(&[(0, 8)]),
            "tensor 0: action: expected a number from 0 to 7, found 8",
        ),
        (
            entry(&[(1, 5)]),
            "tensor 0: element type: expected a number from 0 to 4, found 5",
        ),
        (
            entry(&[(36, 2)]),
            "tensor 0: has scale: expected 0 or 1, found 2",
        ),
        (
            [entry(&[]), vec![0; 5]].concat(),
            "after the tensors, read with a table of sections: \
             the file ends in the LoRA block: 4 bytes needed, 1 left; \
             read without one: the file ends in the LoRA block: 4 bytes needed, 1 left",
        ),
    ] {
        assert_eq!(parse(&bytes), message);
    }
}

/// A file of one tensor with a word or more of its header changed.
fn changed(changes: &[(usize, u64)]) -> String {
    let facts = ModelFacts {
        arch: ArchType::BitNet,
        tied_embeddings: true,
        hidden_dim: 128,
        intermediate_dim: 128,
        hidden_dim_orig: 100,
        intermediate_dim_orig: 120,
        norm_eps: 1e-5,
    };
    let form = TensorForm {
        action: Action::RepackTernary,
        dtype: sterna_format::DType::I2_S,
        rows: 4,
        cols: 100,
        padded_rows: 4,
        padded_cols: 128,
    };
    let file = TensorFile::layout(facts, &[form]).unwrap();
    let mut header = file.header();
    for &(at, value) in changes {
        let n = if at >= 88 || at == 48 { 8 } else { 4 };
        header[at..at + n].copy_from_slice(&value.to_le_bytes()[..n]);
    }
    let read = TensorFile::parse(&header, file.file_len());
    read.unwrap_err().to_string()
}

#[test]
fn bad_tensor_files_say_what_and_where() {
    for (changes, message) in [
        (
            // The letters the other way round.
            &[(0, 0x5452_4c4d)][..],
            "the header: magic: expected `TRLM`, found `MLRT`",
        ),
        (&[(4, 2)], "the header: version: expected 1, found 2"),
        (
            &[(8, 8)],
            "the header: architecture: expected a number from 0 to 7, found 8",
        ),
        (
            &[(12, 1)],
            "the header: reserved field: expected 0, found 1",
        ),
        (
            &[(16, 2)],
            "the header: version of the body: expected 1, found 2",
        ),
        (
            &[(20, 1 << 17)],
            "the list of tensors: length: expected at most 65536, found 131072",
        ),
        (
            &[(20, 1000)],
            "the file ends in the list of tensors: 40000 bytes needed, 224 left",
        ),
        (&[(24, 2)], "the header: flags: expected 0 or 1, found 2"),
        (
            &[(28, 99)],
            "the header: hidden dimension: expected at least the model's own, 100, found 99",
        ),
        (
            &[(48, 0x7ff8_0000_0000_0000)],
            "the header: epsilon of the norms: expected a number not below 0, found NaN",
        ),
        (
            &[(64, 9)],
            "tensor 0: action: expected a number from 0 to 7, found 9",
        ),
        (
            &[(68, 0)],
            "tensor 0: stored type: expected the id of a type that action REPACK_TERNARY makes, found 0",
        ),
        (&[(72, 0)], "tensor 0: rows: expected at least 1, found 0"),
        (
            &[(84, 99)],
            "tensor 0: padded columns: expected at least 100, found 99",
        ),
        (&[(96, 159)], "tensor 0: size: expected 160, found 159"),
        (
            &[(88, 130)],
            "tensor 0: offset: expected a multiple of 64, found 130",
        ),
        (
            &[(88, 64)],
            "tensor 0: offset: expected at least 128, where what precedes it ends, found 64",
        ),
        (
            &[(88, 192)],
            "the file ends in tensor 0: 160 bytes needed, 96 left",
        ),
        (
            &[(88, 1 << 63), (96, 160)],
            "the file ends in tensor 0: 160 bytes needed, 0 left",
        ),
    ] {
        assert_eq!(changed(changes), message);
    }
}

#[test]
fn adapters_out_of_order_are_refused() {
    let matrix = |rows, cols| StoredMatrix {
        dtype: sterna_format::DType::F32,
        rows,
        cols,
        offset: 0,
        size: 0,
    };
    let pair = |layer, target| LoraPair {
        layer,
        target,
        a: matrix(2, 8),
        b: matrix(4, 2),
    };
    let refused = |pairs| LoraFile::layout(2, 1.0, pairs).unwrap_err().to_string();
    let expected = "expected pairs in order, each once, of layers below 2, found another";
    for (pairs, place) in [
        (vec![pair(2, LoraTarget::K)], "layer 2, self_attn.k_proj"),
        (vec![pair(0, LoraTarget::K); 2], "layer 0, self_attn.k_proj"),
        (
            vec![pair(1, LoraTarget::K), pair(0, LoraTarget::Up)],
            "layer 0, mlp.up_proj",
        ),
    ] {
        assert_eq!(refused(pairs), format!("{place}: place: {expected}"));
    }
    let mut odd = pair(0, LoraTarget::Q);
    odd.b.cols = 3;
    assert_eq!(
        refused(vec![odd]),
        "layer 0, self_attn.q_proj: B: columns: expected the 2 rows of A, found 3"
    );
    let too_many = LoraFile::layout(4097, 1.0, vec![]).unwrap_err().to_string();
    assert_eq!(
        too_many,
        "the LoRA block: layers: expected at most 4096, found 4097"
    );
}
