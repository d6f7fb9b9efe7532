//! A chat at a terminal: the program in a pseudo-terminal, and a user who types.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use rustix::pty::{self, OpenptFlags};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

/// Longest wait for output; machines that run tests are busy.
const PATIENCE: Duration = Duration::from_secs(60);

const UP: &str = "\x1b[A";
const LEFT: &str = "\x1b[D";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const BACKSPACE: &str = "\x7f";

/// A terminal, and the program in it.
struct Terminal {
    keyboard: File,
    arriving: Receiver<Vec<u8>>,
    /// What was printed and not yet expected.
    screen: String,
    bytes: Vec<u8>,
    child: Child,
}

impl Terminal {
    /// Starts `sterna` with `args` in a terminal that is `width` columns wide.
    fn start(home: &Path, width: u16, args: &[&str], env: &[(&str, &str)]) -> Terminal {
        let master = pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        pty::grantpt(&master).unwrap();
        pty::unlockpt(&master).unwrap();
        let name = pty::ptsname(&master, Vec::new()).unwrap();
        const O_NOCTTY: i32 = 0o400;
        let end = File::options()
            .read(true)
            .write(true)
            .custom_flags(O_NOCTTY)
            .open(name.to_str().unwrap())
            .unwrap();
        let keyboard = File::from(master);
        resize(&keyboard, width);
        // Makes it the terminal that Ctrl-C comes from.
        let mut command = Command::new("setsid");
        command
            .arg("--ctty")
            .arg(env!("CARGO_BIN_EXE_sterna"))
            .args(args)
            .env("STERNA_HOME", home)
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .envs(env.iter().copied())
            .stdin(end.try_clone().unwrap())
            .stdout(end.try_clone().unwrap())
            .stderr(end);
        let child = command.spawn().unwrap();
        // The terminal ends with its last user.
        drop(command);
        let mut output = keyboard.try_clone().unwrap();
        let (sender, arriving) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = output.read(&mut bytes) {
                if sender.send(bytes[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal {
            keyboard,
            arriving,
            screen: String::new(),
            bytes: Vec::new(),
            child,
        }
    }

    /// Starts a greedy chat with the built-in model, and waits for its prompt.
    fn chat(home: &Path, args: &[&str]) -> Terminal {
        let chat = ["run", "--temp", "0", "-t", "1"];
        let mut terminal = Terminal::start(home, 80, &[&chat, args].concat(), &[]);
        terminal.expect("Ctrl-D leaves.");
        terminal.expect_prompt();
        terminal
    }

    fn type_keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Takes in what is printed until it contains `text`; returns what came before.
    #[track_caller]
    fn expect(&mut self, text: &str) -> String {
        let begun = Instant::now();
        loop {
            if let Some(at) = self.screen.find(text) {
                let before = self.screen[..at].to_owned();
                self.screen.drain(..at + text.len());
                return before;
            }
            let left = PATIENCE.saturating_sub(begun.elapsed());
            match self.arriving.recv_timeout(left) {
                Ok(bytes) => self.take(&bytes),
                Err(_) => panic!("expected {text:?}, found {:?}", self.screen),
            }
        }
    }

    /// Adds complete characters.
    fn take(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        let valid = match std::str::from_utf8(&self.bytes) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        let text: Vec<u8> = self.bytes.drain(..valid).collect();
        self.screen += &String::from_utf8(text).unwrap();
    }

    /// Waits until a line can be typed.
    #[track_caller]
    fn expect_prompt(&mut self) {
        // Bracketed paste is switched on in front of the prompt.
        self.expect("\x1b[?2004h");
        self.expect("> ");
    }

    /// Says `keys`, which end with a line end, and waits for the next prompt; returns what was printed.
    #[track_caller]
    fn say(&mut self, keys: &str) -> String {
        self.type_keys(keys);
        // Switched off when the line is complete.
        self.expect("\x1b[?2004l");
        let printed = self.expect("\x1b[?2004h");
        self.expect("> ");
        printed
    }

    /// What was said so far.
    #[track_caller]
    fn messages(&mut self, dir: &Path) -> Vec<String> {
        let file = dir.join("said.json");
        let printed = self.say(&format!("/save {}\r", file.display()));
        assert!(printed.contains("Saved"), "{printed:?}");
        let saved: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        let messages = saved["messages"].as_array().unwrap().iter();
        let of_user = messages.filter(|message| message["role"] == "user");
        of_user
            .map(|message| message["content"].as_str().unwrap().to_owned())
            .collect()
    }

    /// The exit status, once the program ends.
    #[track_caller]
    fn end(mut self) -> Option<i32> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            thread::sleep(Duration::from_millis(10));
        }
        self.child.kill().unwrap();
        panic!("expected it to end, found {:?}", self.screen);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes the terminal `width` columns wide, and tells the program.
fn resize(terminal: &File, width: u16) {
    let size = Winsize {
        ws_row: 24,
        ws_col: width,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(terminal, size).unwrap();
}

#[test]
fn lines_are_edited_and_remembered() {
    let home = tempfile::tempdir().unwrap();
    let mut chat = Terminal::chat(home.path(), &[]);
    let printed = chat.say("What is 3 plus 4?\r");
    assert!(printed.contains("3 plus 4 is 7."), "{printed:?}");
    // The line before, its 4 made a 2.
    chat.say(&format!("{UP}{LEFT}{BACKSPACE}2\r"));
    assert_eq!(
        chat.messages(home.path()),
        ["What is 3 plus 4?", "What is 3 plus 2?"]
    );
    chat.type_keys(CTRL_D);
    assert_eq!(chat.end(), Some(0));

    let history = home.path().join("history");
    let mode = fs::metadata(&history).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let before = fs::read(&history).unwrap();
    let mut chat = Terminal::chat(home.path(), &["--no-history"]);
    chat.say("Who are you?\r");
    chat.type_keys("/bye\r");
    assert_eq!(chat.end(), Some(0));
    assert_eq!(fs::read(&history).unwrap(), before);

    let mut chat = Terminal::chat(home.path(), &[]);
    // The newest is the command that saved.
    chat.type_keys(&format!("{UP}{UP}"));
    chat.expect("What is 3 plus 2?");
    chat.type_keys(CTRL_C);
    chat.expect("Ctrl-D or /exit leaves.");
    chat.expect_prompt();
    let printed = chat.say("/quit now\r");
    assert!(
        printed.contains("/quit: expected nothing after it, found `now`."),
        "{printed:?}"
    );
    chat.type_keys("/quit\r");
    assert_eq!(chat.end(), Some(0));
}

#[test]
fn several_lines_are_one_message() {
    let home = tempfile::tempdir().unwrap();
    let mut chat = Terminal::chat(home.path(), &["--no-history", "-n", "4"]);
    chat.say("\x1b[200~Pasted\rin brackets.\x1b[201~\r");
    // Without brackets, all at once, and more than what is read at a time.
    let long = "and on ".repeat(150);
    chat.type_keys(&format!(
        "\"\"\"Pasted\rwithout {long}\rbrackets.\"\"\"\rNext.\r"
    ));
    // Three lines of a block, and one.
    for _ in 0..4 {
        chat.expect("\x1b[?2004l");
    }
    chat.expect_prompt();
    chat.type_keys("Typed with\\\r");
    chat.expect(". ");
    chat.say("a backslash.\r");
    assert_eq!(
        chat.messages(home.path()),
        [
            "Pasted\nin brackets.".to_owned(),
            format!("Pasted\nwithout {long}\nbrackets."),
            "Next.".to_owned(),
            "Typed with\na backslash.".to_owned(),
        ]
    );
}

#[test]
fn ctrl_c_stops_an_answer_or_drops_a_line() {
    let home = tempfile::tempdir().unwrap();
    let mut chat = Terminal::chat(home.path(), &["--no-history"]);
    // So hot that it doesn't end by itself.
    chat.say("/set temperature 50\r");
    chat.say("/set top-k 0\r");
    chat.say("/set top-p 1\r");
    chat.say("/set min-p 0\r");
    chat.say("/set seed 1\r");
    chat.type_keys("Tell me a story.\r");
    chat.expect("\x1b[?2004l");
    chat.expect("\r\n");
    while chat.screen.trim().is_empty() {
        let bytes = chat.arriving.recv_timeout(PATIENCE).unwrap();
        chat.take(&bytes);
    }
    chat.type_keys(CTRL_C);
    chat.expect_prompt();
    let stats = chat.say("/stats\r");
    assert!(stats.contains("interrupted"), "{stats:?}");
    chat.type_keys("half a line");
    chat.expect("half a line");
    chat.type_keys(CTRL_C);
    chat.expect("Ctrl-D or /exit leaves.");
    chat.expect_prompt();
    chat.say("/set temperature 0\r");
    chat.say("Who are you?\r");
    assert_eq!(
        chat.messages(home.path()),
        ["Tell me a story.", "Who are you?"]
    );
}

#[test]
fn any_width_and_any_character_will_do() {
    let home = tempfile::tempdir().unwrap();
    let args = ["run", "--temp", "0", "-n", "4", "--no-history", "-q"];
    let mut chat = Terminal::start(home.path(), 12, &args, &[]);
    chat.expect_prompt();
    let long = "a line that is longer than the terminal is wide";
    chat.say(&format!("{long}\r"));
    // In mid-line, to another width.
    chat.type_keys("before ");
    chat.expect("before");
    resize(&chat.keyboard, 40);
    chat.say("and after\r");
    chat.say(&format!("für 👩‍👩‍👧x{LEFT}{BACKSPACE}🦊\r"));
    assert_eq!(
        chat.messages(home.path()),
        [long, "before and after", "für 🦊x"]
    );
    chat.type_keys("/exit\r");
    assert_eq!(chat.end(), Some(0));
}

#[test]
fn conversations_are_saved_in_the_home_folder_and_replace_no_other_file() {
    let home = tempfile::tempdir().unwrap();
    let env = [("HOME", home.path().to_str().unwrap())];
    let args = ["run", "--temp", "0", "-n", "1", "-t", "1", "--no-history"];
    let mut chat = Terminal::start(home.path(), 200, &args, &env);
    chat.expect_prompt();
    chat.say("Who are you?\r");
    chat.say("/save ~/said.json\r");
    assert!(home.path().join("said.json").is_file());
    let printed = chat.say("/load ~/said.json\r");
    assert!(printed.contains("Loaded 2 messages"), "{printed:?}");
    fs::write(home.path().join("mine"), "mine").unwrap();
    let printed = chat.say("/save ~/mine\r");
    let message = "mine: expected a saved conversation, found another file";
    assert!(
        printed.contains("error: not replaced: ") && printed.contains(message),
        "{printed:?}"
    );
    assert_eq!(fs::read(home.path().join("mine")).unwrap(), b"mine");
    chat.type_keys("/exit\r");
    assert_eq!(chat.end(), Some(0));
}

#[test]
fn a_chat_has_no_json() {
    let home = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::start(home.path(), 200, &["run", "--json"], &[]);
    terminal.expect("--json: expected a prompt");
    assert_eq!(terminal.end(), Some(1));
}

#[test]
fn colours_can_be_left_out() {
    let home = tempfile::tempdir().unwrap();
    let printed = |env: &[(&str, &str)]| {
        let args = ["run", "--seed", "x"];
        let mut terminal = Terminal::start(home.path(), 80, &args, env);
        let before = terminal.expect("--help");
        assert_eq!(terminal.end(), Some(2));
        before
    };
    assert!(printed(&[]).contains('\x1b'));
    assert!(!printed(&[("NO_COLOR", "1")]).contains('\x1b'));
}
