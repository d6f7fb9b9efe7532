//! What `sterna tune` measured, in a file for each adapter and set of features.
//!
//! It is valid for one driver and exactly these kernels. Results that don't match are not used; invalid files
//! are not used either, and no reason to stop.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sterna_delivery::PartialFile;
use sterna_gpu::tuning::{LaunchConfig, Measured, Product, RowClass};
use sterna_gpu::{AdapterInfo, Features, WeightKind, shader};

use crate::folders;

/// The version of the file format.
const FORM: u32 = 1;

/// Limits on the size of a file and its number of products.
const MAX_BYTES: u64 = 1 << 20;
const MAX_PRODUCTS: usize = 4096;

/// What a measurement is valid for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key {
    adapter: String,
    api: String,
    /// Those that affect kernels.
    features: Vec<String>,
    driver: String,
    /// A hash of the kernels.
    kernels: String,
}

impl Key {
    /// The adapter and driver of `info` with these `features`, and the kernels of this program.
    pub(crate) fn new(info: &AdapterInfo, features: Features) -> Key {
        let of_no_matter = ["timestamps", "pipeline-cache"];
        let names = features.names().into_iter();
        Key {
            adapter: info.name.clone(),
            api: format!("{:?}", info.api).to_lowercase(),
            features: names
                .filter(|name| !of_no_matter.contains(name))
                .map(str::to_owned)
                .collect(),
            driver: info.driver.clone(),
            kernels: format!("{:016x}", shader::fingerprint()),
        }
    }

    /// The path of the file, whether it exists or not.
    fn path(&self) -> Result<PathBuf> {
        // The content says what it is for; names only need to be distinct.
        let name = plain(&[self.stem(), self.features.join("-")].concat());
        Ok(folders::tuning()?.join(name + ".json"))
    }

    /// The prefix of the names of all files for the adapter, whatever the features.
    fn stem(&self) -> String {
        format!("{}-{}-", self.adapter, self.api)
    }
}

/// A safe file name of letters, digits and little else.
fn plain(name: &str) -> String {
    let mut name = name.to_ascii_lowercase();
    name.retain(|c| c.is_ascii_alphanumeric() || "-. ".contains(c));
    name.replace(' ', "-").chars().take(150).collect()
}

/// A file, as stored.
#[derive(Debug, Serialize, Deserialize)]
struct Content {
    form: u32,
    #[serde(flatten)]
    key: Key,
    /// Seconds since 1970.
    measured_at: u64,
    products: Vec<Row>,
}

/// The result for a product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Row {
    weights: String,
    n: usize,
    k: usize,
    rows: String,
    lanes: Option<u32>,
    workgroup: Option<u32>,
    rounds_itself: Option<bool>,
    matrix_units: Option<bool>,
    /// Microseconds, and those of the default configuration.
    us: f64,
    rule_us: f64,
}

impl Row {
    fn new(found: &Measured) -> Row {
        let LaunchConfig {
            lanes,
            workgroup,
            rounds_itself,
            matrix_units,
        } = found.best;
        Row {
            weights: found.product.weights.name().to_owned(),
            n: found.product.n,
            k: found.product.k,
            rows: found.product.rows.name().to_owned(),
            lanes,
            workgroup,
            rounds_itself,
            matrix_units,
            us: found.best_us,
            rule_us: found.rule_us,
        }
    }

    fn config(&self) -> Result<(Product, LaunchConfig)> {
        let rows = RowClass::ALL.into_iter();
        let product = Product {
            weights: WeightKind::named(&self.weights)
                .with_context(|| format!("expected a type of weights, found `{}`", self.weights))?,
            n: self.n,
            k: self.k,
            rows: rows
                .clone()
                .find(|class| class.name() == self.rows)
                .with_context(|| {
                    format!("expected one, few or many rows, found `{}`", self.rows)
                })?,
        };
        let config = LaunchConfig {
            lanes: self.lanes,
            workgroup: self.workgroup,
            rounds_itself: self.rounds_itself,
            matrix_units: self.matrix_units,
        };
        Ok((product, config))
    }

    fn is_of(&self, other: &Row) -> bool {
        let product = |row: &Row| (row.weights.clone(), row.n, row.k, row.rows.clone());
        product(self) == product(other)
    }
}

/// The stored measurements of an adapter.
#[derive(Debug)]
pub(crate) enum Found {
    Nothing,
    /// Valid measurements.
    Kept(Kept),
    /// Measurements for something else, and for what.
    Stale(String),
    /// Why the file can't be read.
    Damaged(String),
}

/// Valid measurements.
#[derive(Debug)]
pub(crate) struct Kept {
    content: Content,
    configs: Vec<(Product, LaunchConfig)>,
}

impl Kept {
    /// Products and their best configurations.
    pub(crate) fn configs(&self) -> impl Iterator<Item = (Product, LaunchConfig)> {
        self.configs.iter().copied()
    }

    /// How many products were measured, and how many of them don't use the default configuration.
    pub(crate) fn n_products(&self) -> [usize; 2] {
        let rows = &self.content.products;
        [
            rows.len(),
            rows.iter().filter(|row| row.us < row.rule_us).count(),
        ]
    }

    /// Days since the last measurement.
    pub(crate) fn age_days(&self) -> u64 {
        now().saturating_sub(self.content.measured_at) / (24 * 60 * 60)
    }
}

/// The stored measurements for `key`.
pub(crate) fn kept(key: &Key) -> Found {
    // Without a folder, nothing is stored.
    let Ok(path) = key.path() else {
        return Found::Nothing;
    };
    let bytes = match read(&path) {
        Ok(None) => return Found::Nothing,
        Ok(Some(bytes)) => bytes,
        Err(error) => return Found::Damaged(format!("{}: {error:#}", path.display())),
    };
    match parse(&bytes, key) {
        Ok(found) => found,
        Err(error) => Found::Damaged(format!("{}: {error:#}", path.display())),
    }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context("cannot open"),
    };
    let mut bytes = Vec::new();
    let read = file.take(MAX_BYTES + 1).read_to_end(&mut bytes);
    read.context("cannot read")?;
    if bytes.len() as u64 > MAX_BYTES {
        anyhow::bail!("expected at most {MAX_BYTES} bytes, found more");
    }
    Ok(Some(bytes))
}

fn parse(bytes: &[u8], key: &Key) -> Result<Found> {
    let content: Content = serde_json::from_slice(bytes).context("expected what `tune` writes")?;
    let theirs = &content.key;
    if content.form != FORM {
        return Ok(Found::Stale(format!("in format version {}", content.form)));
    }
    for (what, theirs, ours) in [
        ("adapter", &theirs.adapter, &key.adapter),
        ("interface", &theirs.api, &key.api),
        ("driver", &theirs.driver, &key.driver),
    ] {
        if theirs != ours {
            return Ok(Found::Stale(format!("with {what} {theirs}")));
        }
    }
    if theirs.kernels != key.kernels {
        return Ok(Found::Stale("with kernels of another version".into()));
    }
    if theirs.features != key.features {
        return Ok(Found::Stale("with other features".into()));
    }
    let n = content.products.len();
    if n > MAX_PRODUCTS {
        anyhow::bail!("expected at most {MAX_PRODUCTS} products, found {n}");
    }
    let rows = content.products.iter().enumerate();
    let configs = rows.map(|(i, row)| row.config().with_context(|| format!("product {i}")));
    Ok(Found::Kept(Kept {
        configs: configs.collect::<Result<_>>()?,
        content,
    }))
}

/// Stores new results, merged with those of other products; returns where.
pub(crate) fn save(key: &Key, found: &[Measured]) -> Result<PathBuf> {
    let path = key.path()?;
    let mut products: Vec<Row> = found.iter().map(Row::new).collect();
    if let Found::Kept(before) = kept(key) {
        let rows = before.content.products.into_iter();
        let others: Vec<Row> = rows
            .filter(|row| !products.iter().any(|new| new.is_of(row)))
            .collect();
        products.extend(others);
    }
    products.truncate(MAX_PRODUCTS);
    let content = Content {
        form: FORM,
        key: key.clone(),
        measured_at: now(),
        products,
    };
    write(&path, &content).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// Fails if nothing could be stored for `key`.
pub(crate) fn check(key: &Key) -> Result<()> {
    let path = key.path()?;
    new_file(&path).with_context(|| path.display().to_string())?;
    Ok(())
}

/// Under another name first: a reader sees the old file or the new one.
fn write(path: &Path, content: &Content) -> Result<()> {
    let mut file = new_file(path)?;
    let text = serde_json::to_string_pretty(content)?;
    let written = file.write_all(text.as_bytes());
    written.and_then(|()| file.finish()).context("cannot write")
}

/// A temporary file next to `path`, which may replace it.
fn new_file(path: &Path) -> Result<PartialFile> {
    let folder = path.parent().context("expected a file in a folder")?;
    fs::create_dir_all(folder).context("cannot make the folder")?;
    PartialFile::create(path).context("cannot write")
}

/// Removes what is stored for the adapter of `key`, whatever the features; returns the files that were
/// removed.
pub(crate) fn remove(key: &Key) -> Result<Vec<PathBuf>> {
    let folder = folders::tuning()?;
    let at_folder = || folder.display().to_string();
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(at_folder),
    };
    let stem = plain(&key.stem());
    let mut removed = Vec::new();
    for entry in entries {
        let path = entry.with_context(at_folder)?.path();
        let name = path.file_name().map(|name| name.to_string_lossy());
        if name.is_some_and(|name| name.starts_with(&stem) && name.ends_with(".json")) {
            fs::remove_file(&path).with_context(|| path.display().to_string())?;
            removed.push(path);
        }
    }
    removed.sort();
    Ok(removed)
}

/// Seconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use sterna_format::DType;

    use super::*;

    fn key() -> Key {
        Key {
            adapter: "A GPU (tm)".into(),
            api: "vulkan".into(),
            features: vec!["subgroups".into()],
            driver: "1.2".into(),
            kernels: "0123".into(),
        }
    }

    fn measured(n: usize, workgroup: u32) -> Measured {
        let best = LaunchConfig {
            workgroup: Some(workgroup),
            lanes: Some(16),
            rounds_itself: Some(false),
            matrix_units: None,
        };
        Measured {
            product: Product {
                weights: WeightKind::Blocks(DType::Q4_K),
                n,
                k: 512,
                rows: RowClass::One,
            },
            n_matrices: 1,
            rule: LaunchConfig::default(),
            rule_us: 2.0,
            best,
            best_us: 1.0,
            n_configs: 2,
            wrong: Vec::new(),
        }
    }

    fn content(products: &[Measured]) -> Content {
        Content {
            form: FORM,
            key: key(),
            measured_at: 5,
            products: products.iter().map(Row::new).collect(),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b.json");
        assert!(read(&path).unwrap().is_none());
        let found = [measured(8, 64), measured(16, 128)];
        for products in [&found[..1], &found] {
            write(&path, &content(products)).unwrap();
            let bytes = read(&path).unwrap().unwrap();
            let Found::Kept(kept) = parse(&bytes, &key()).unwrap() else {
                panic!("not kept");
            };
            let configs: Vec<_> = kept.configs().collect();
            let expected: Vec<_> = products.iter().map(|f| (f.product, f.best)).collect();
            assert_eq!(configs, expected);
            assert_eq!(kept.n_products(), [products.len(); 2]);
            assert!(kept.age_days() > 10_000);
        }
        let files = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(files, 1);
    }

    #[test]
    fn what_was_measured_with_something_else_is_stale() {
        let bytes = serde_json::to_vec(&content(&[measured(8, 64)])).unwrap();
        type Change = fn(&mut Key);
        let changes: [(&str, Change); 5] = [
            ("adapter", |key| key.adapter = "B".into()),
            ("interface", |key| key.api = "metal".into()),
            ("driver", |key| key.driver = "2".into()),
            ("kernels", |key| key.kernels = "9".into()),
            ("features", |key| key.features.clear()),
        ];
        for (what, change) in changes {
            let mut key = key();
            change(&mut key);
            match parse(&bytes, &key).unwrap() {
                Found::Stale(reason) => assert!(reason.contains(what), "{reason}"),
                found => panic!("{what}: {found:?}"),
            }
        }
        let mut other = content(&[]);
        other.form = 2;
        let bytes = serde_json::to_vec(&other).unwrap();
        assert!(matches!(parse(&bytes, &key()).unwrap(), Found::Stale(_)));
    }

    #[test]
    fn damaged_files_are_told_from_good_ones() {
        let text = serde_json::to_string(&content(&[measured(8, 64)])).unwrap();
        for (from, to) in [
            ("{", ""),
            ("Q4_K", "Q4_X"),
            (r#""one""#, r#""two""#),
            (r#""n":8"#, r#""n":-8"#),
            (r#""lanes":16"#, r#""lanes":4294967296"#),
            ("}]}", "}"),
        ] {
            let damaged = text.replacen(from, to, 1);
            assert_ne!(damaged, text, "{from}");
            assert!(parse(damaged.as_bytes(), &key()).is_err(), "{damaged}");
        }
        let many = content(&vec![measured(8, 64); MAX_PRODUCTS + 1]);
        let bytes = serde_json::to_vec(&many).unwrap();
        let message = format!("{:#}", parse(&bytes, &key()).unwrap_err());
        assert!(message.contains("found 4097"), "{message}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("large");
        let file = File::create(&path).unwrap();
        file.set_len(MAX_BYTES + 1).unwrap();
        let message = format!("{:#}", read(&path).unwrap_err());
        assert!(message.contains("expected at most"), "{message}");
    }

    #[test]
    fn names_of_files_are_plain() {
        let mut key = key();
        key.adapter = "../../A/B\\C: \u{1b}[2J".repeat(30);
        let path = key.path().unwrap();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(name.len() < 160 && name.ends_with(".json"), "{name}");
        assert!(
            name.chars()
                .all(|c| c.is_ascii_alphanumeric() || "-.".contains(c))
        );
        assert!(path.starts_with(folders::tuning().unwrap()));
    }
}
