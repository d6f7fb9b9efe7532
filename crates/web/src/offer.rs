//! What a tab gives of a package that it has.

use std::collections::BTreeMap;

use serde::Serialize;
use sterna::{Error, ErrorCode, Result};
use sterna_delivery::hash::{Algorithm, Digest, digest_of};
use sterna_delivery::package::{CONFIG_FILE, Contents};
use sterna_delivery::peers::{Reply, Request};
use sterna_delivery::sign::SIGNATURE_FILE;
use sterna_format::rdrr::{MANIFEST_FILE, Manifest};
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;

use crate::js::{Files, failure, to_js};
use crate::remote::whole;

/// The files of one package, by its manifest: nothing else is there for peers.
#[wasm_bindgen]
pub struct Offer {
    manifest: Digest,
    sizes: BTreeMap<String, u64>,
}

/// What a request is answered.
#[derive(Serialize)]
struct Answer {
    /// The head.
    reply: String,
    /// The bytes that follow.
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<Part>,
}

#[derive(Serialize)]
struct Part {
    file: String,
    start: u64,
    end: u64,
}

#[wasm_bindgen]
impl Offer {
    /// Reads the manifest of the package in `files`, which has to be whole.
    pub async fn open(files: Files) -> Result<Offer, JsValue> {
        Offer::read(&files).await.map_err(|error| failure(&error))
    }

    /// The SHA-256 of its manifest.
    pub fn manifest(&self) -> String {
        self.manifest.to_string()
    }

    /// What a request is answered: the head, and the bytes behind it.
    pub fn answer(&self, request: &str) -> Result<JsValue, JsValue> {
        let found = self.find(request);
        let (reply, part) = match found {
            Ok((size, part)) => (Reply::Bytes { size }, Some(part)),
            Err(reply) => (reply, None),
        };
        let reply = reply.to_json();
        to_js(&Answer { reply, part })
    }
}

impl Offer {
    async fn read(files: &Files) -> Result<Offer> {
        let bytes = whole(files, MANIFEST_FILE).await?.ok_or_else(|| {
            let message = "expected a package, which has a manifest.json, found another model";
            Error::new(ErrorCode::Unsupported, message)
        })?;
        let parsed =
            Manifest::parse(&bytes).map_err(|error| Error::typed(ErrorCode::InvalidFile, error))?;
        let contents = Contents::of(MANIFEST_FILE, &parsed)
            .map_err(|error| Error::typed(ErrorCode::InvalidFile, error))?;
        let mut sizes = BTreeMap::from([(MANIFEST_FILE.to_owned(), bytes.len() as u64)]);
        for file in contents.files() {
            let found = files.len(file.name()).await?;
            if found != Some(file.size()) {
                let (name, size) = (file.name(), file.size());
                let found = found.map_or("none".to_owned(), |len| format!("{len}"));
                let message = format!("{name}: expected {size} bytes in the store, found {found}");
                return Err(Error::new(ErrorCode::NotFound, message));
            }
            sizes.insert(file.name().to_owned(), file.size());
        }
        let optional = [SIGNATURE_FILE, CONFIG_FILE].map(str::to_owned);
        for name in optional.into_iter().chain(contents.unverified().to_vec()) {
            if let Some(len) = files.len(&name).await? {
                sizes.insert(name, len);
            }
        }
        Ok(Offer {
            manifest: digest_of(Algorithm::Sha256, &bytes),
            sizes,
        })
    }

    fn find(&self, request: &str) -> Result<(u64, Part), Reply> {
        let (request, manifest) = Request::read(request.as_bytes())?;
        let size = self.sizes.get(request.file());
        let size = size.filter(|_| manifest == self.manifest);
        let size = *size.ok_or(Reply::Unknown)?;
        let part = request.part(size)?;
        let part = Part {
            file: request.file().to_owned(),
            start: part.start,
            end: part.end,
        };
        Ok((size, part))
    }
}
