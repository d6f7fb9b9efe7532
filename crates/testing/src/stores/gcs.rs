//! What fake-gcs-server lacks of Google's XML API: uploads to an object's own address, on condition of its generation,
//! and in parts. All else is passed on to it, and objects are kept there.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, BufReader, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

/// A proxy before the server at `upstream`, until this process ends; returns its address.
pub(super) fn serve(upstream: &str) -> io::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let proxy = Arc::new(Proxy {
        upstream: upstream.to_owned(),
        uploads: Mutex::default(),
    });
    thread::spawn(move || {
        for stream in listener.incoming() {
            let proxy = Arc::clone(&proxy);
            // A client that is killed breaks its connections.
            thread::spawn(move || proxy.answer(&stream?));
        }
    });
    Ok(address)
}

struct Proxy {
    upstream: String,
    /// Parts of what has begun, by its id and their numbers. Held while an object is compared and written.
    uploads: Mutex<HashMap<String, BTreeMap<u32, Vec<u8>>>>,
}

/// A request, without what is of its connection alone.
struct Request {
    method: String,
    /// With the query.
    path: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Request {
    /// Reads one; `None` at the end of the connection.
    fn read(reader: &mut impl io::BufRead) -> io::Result<Option<Self>> {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let mut words = line.split(' ').map(str::to_owned);
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let (mut headers, mut length) = (Vec::new(), 0);
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                break;
            };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.parse().unwrap(),
                "connection" => {}
                name => headers.push((name.to_owned(), value.to_owned())),
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        Ok(Some(Self {
            method,
            path,
            headers,
            body,
        }))
    }

    /// The value of a parameter of the query.
    fn parameter(&self, name: &str) -> Option<&str> {
        let (_, query) = self.path.split_once('?')?;
        let mut pairs = query
            .split('&')
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        pairs.find_map(|(key, value)| (key == name).then_some(value))
    }

    fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        headers.find_map(|(key, value)| (key == name).then_some(value.as_str()))
    }

    /// The address of its object.
    fn object(&self) -> &str {
        self.path.split('?').next().unwrap()
    }
}

/// What is said of an object.
struct Head {
    etag: String,
    generation: String,
}

impl Proxy {
    /// Answers the only request of a connection.
    fn answer(&self, mut client: &TcpStream) -> io::Result<()> {
        let Some(request) = Request::read(&mut BufReader::new(client))? else {
            return Ok(());
        };
        let answer = self.answer_to(&request)?;
        client.write_all(&answer)?;
        client.shutdown(Shutdown::Both)
    }

    fn answer_to(&self, request: &Request) -> io::Result<Vec<u8>> {
        let mut uploads = self.uploads.lock().unwrap();
        let unknown = || {
            reply(
                "404 Not Found",
                &[],
                "<Error><Code>NoSuchUpload</Code></Error>",
            )
        };
        let upload = request.parameter("uploadId");
        match (request.method.as_str(), upload) {
            ("POST", None) if request.parameter("uploads").is_some() => {
                let id = format!("upload{}", uploads.len());
                let told = format!(
                    "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                );
                uploads.insert(id, BTreeMap::new());
                Ok(reply("200 OK", &[], &told))
            }
            ("PUT", Some(id)) => {
                let Some(parts) = uploads.get_mut(id) else {
                    return Ok(unknown());
                };
                let number = request.parameter("partNumber").unwrap().parse().unwrap();
                parts.insert(number, request.body.clone());
                Ok(reply("200 OK", &[("ETag", &format!("\"{number}\""))], ""))
            }
            ("POST", Some(id)) => {
                let Some(parts) = uploads.get_mut(id) else {
                    return Ok(unknown());
                };
                let told = String::from_utf8_lossy(&request.body);
                let numbers = told.split("<PartNumber>").skip(1);
                let numbers = numbers.map(|rest| rest.split('<').next().unwrap().parse().unwrap());
                let (mut body, mut last) = (Vec::new(), 0);
                for number in numbers {
                    let (Some(part), true) = (parts.get(&number), number > last) else {
                        let why = "<Error><Code>InvalidPart</Code></Error>";
                        return Ok(reply("400 Bad Request", &[], why));
                    };
                    body.extend_from_slice(part);
                    last = number;
                }
                let head = self.put(request.object(), &body)?;
                // Its id isn't given to another.
                parts.clear();
                let told = format!(
                    "<CompleteMultipartUploadResult><ETag>{}</ETag></CompleteMultipartUploadResult>",
                    head.etag
                );
                let headers = [("x-goog-generation", head.generation.as_str())];
                Ok(reply("200 OK", &headers, &told))
            }
            ("DELETE", Some(id)) => match uploads.get_mut(id) {
                Some(parts) => {
                    parts.clear();
                    Ok(reply("204 No Content", &[], ""))
                }
                None => Ok(unknown()),
            },
            ("PUT", None) => {
                if let Some(expected) = request.header("x-goog-if-generation-match")
                    && self.head(request.object())?.generation != expected
                {
                    let why = "<Error><Code>PreconditionFailed</Code></Error>";
                    return Ok(reply("412 Precondition Failed", &[], why));
                }
                let head = self.put(request.object(), &request.body)?;
                let headers = [
                    ("ETag", head.etag.as_str()),
                    ("x-goog-generation", &head.generation),
                ];
                Ok(reply("200 OK", &headers, ""))
            }
            _ => {
                drop(uploads);
                self.ask(
                    &request.method,
                    &request.path,
                    &request.headers,
                    &request.body,
                )
            }
        }
    }

    /// Writes an object, as who has a signed URL for that.
    fn put(&self, object: &str, body: &[u8]) -> io::Result<Head> {
        let path = format!("{object}?X-Goog-Algorithm=none");
        let answer = self.ask("PUT", &path, &[], body)?;
        assert!(
            answer.starts_with(b"HTTP/1.1 200 "),
            "{}",
            String::from_utf8_lossy(&answer)
        );
        self.head(object)
    }

    /// What an object is; where it isn't, its generation is 0.
    fn head(&self, object: &str) -> io::Result<Head> {
        let answer = self.ask("HEAD", object, &[], &[])?;
        let answer = String::from_utf8_lossy(&answer);
        let value = |name: &str| {
            let mut lines = answer.lines().filter_map(|line| line.split_once(": "));
            lines.find_map(|(key, value)| key.eq_ignore_ascii_case(name).then(|| value.to_owned()))
        };
        Ok(Head {
            etag: value("etag").unwrap_or_default(),
            generation: value("x-goog-generation").unwrap_or_else(|| "0".to_owned()),
        })
    }

    /// The whole answer of the server.
    fn ask(
        &self,
        method: &str,
        path: &str,
        headers: &[(String, String)],
        body: &[u8],
    ) -> io::Result<Vec<u8>> {
        let mut server = TcpStream::connect(&self.upstream)?;
        let mut head = format!("{method} {path} HTTP/1.1\r\n");
        let own = [
            ("host".to_owned(), self.upstream.clone()),
            ("content-length".to_owned(), body.len().to_string()),
            ("connection".to_owned(), "close".to_owned()),
        ];
        for (name, value) in headers
            .iter()
            .filter(|(name, _)| name != "host")
            .chain(&own)
        {
            head += &format!("{name}: {value}\r\n");
        }
        server.write_all((head + "\r\n").as_bytes())?;
        server.write_all(body)?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer)?;
        Ok(answer)
    }
}

fn reply(status: &str, headers: &[(&str, &str)], body: &str) -> Vec<u8> {
    let mut answer = format!(
        "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        answer += &format!("{name}: {value}\r\n");
    }
    (answer + "\r\n" + body).into_bytes()
}
