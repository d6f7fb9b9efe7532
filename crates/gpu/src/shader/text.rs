//! The text of shaders' files, which is embedded.

/// The text of files, one after the other; of builds for browsers without the comments, a third of it.
macro_rules! wgsl {
    ($($file:expr),+ $(,)?) => {{
        const TEXT: &str = concat!($(include_str!($file)),+);
        if cfg!(target_family = "wasm") {
            const LEN: usize = $crate::shader::text::without_comments::<0>(TEXT).1;
            const SHORT: [u8; LEN] = $crate::shader::text::without_comments(TEXT).0;
            match str::from_utf8(&SHORT) {
                Ok(text) => text,
                Err(_) => unreachable!(),
            }
        } else {
            TEXT
        }
    }};
}
pub(super) use wgsl;

/// The first `N` bytes of `text` without what follows `//` in a line, and how many there are. Lines keep their
/// numbers.
pub(super) const fn without_comments<const N: usize>(text: &str) -> ([u8; N], usize) {
    let text = text.as_bytes();
    let (mut out, mut len) = ([0; N], 0);
    let mut in_comment = false;
    let mut i = 0;
    while i < text.len() {
        if text[i] == b'/' && i + 1 < text.len() && text[i + 1] == b'/' {
            in_comment = true;
        }
        if text[i] == b'\n' {
            in_comment = false;
        }
        if !in_comment {
            if len < N {
                out[len] = text[i];
            }
            len += 1;
        }
        i += 1;
    }
    (out, len)
}

#[cfg(test)]
mod tests {
    use super::without_comments;
    use crate::shader::{ALL, Lib};

    #[test]
    fn comments_go_and_lines_stay() {
        const TEXT: &str = "// α\nlet a = b / c; // β\n\nreturn a;//\n";
        const LEN: usize = without_comments::<0>(TEXT).1;
        let (bytes, _) = without_comments::<LEN>(TEXT);
        assert_eq!(&bytes, b"\nlet a = b / c; \n\nreturn a;\n");
    }

    /// `//` is a comment everywhere if there is nothing that could contain it.
    #[test]
    fn files_have_no_other_comments() {
        for shader in ALL {
            let libs = shader.libs.iter().filter_map(|lib| match lib {
                Lib::File(text) => Some(*text),
                _ => None,
            });
            // What is left of lines, so that nothing before `//` could have made it part of something else.
            let lines = libs.chain([shader.source]).flat_map(str::lines);
            for line in lines.filter_map(|line| line.split("//").next()) {
                let is_plain = !line.contains("/*") && !line.contains('"');
                assert!(is_plain, "{}: {line}", shader.name);
            }
        }
    }
}
