//! Database programs: servers that run as an unprivileged user, clients that exchange lines, and
//! writers that remember the acknowledged writes. All are ended by PID, also after a panic.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use slackwater_testkit::Scratch;

/// The ID of the unprivileged user that Debian and Ubuntu define for programs without files.
pub const NOBODY: u32 = 65534;

/// The first of these programs that exists. A test never runs without it.
pub fn program(candidates: &[&str]) -> PathBuf {
    let found = candidates.iter().map(Path::new).find(|path| path.exists());
    let found = found.map(Path::to_path_buf);
    found.unwrap_or_else(|| panic!("none of {candidates:?} exists: run deploy/deps test"))
}

/// A folder that belongs to the unprivileged user.
pub fn folder(path: &Path) -> PathBuf {
    std::fs::create_dir_all(path).unwrap();
    std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    path.to_path_buf()
}

/// Lets the unprivileged user traverse to the files below the scratch folder.
pub fn open_to_nobody(scratch: &Scratch) {
    let opened = std::fs::Permissions::from_mode(0o711);
    std::fs::set_permissions(scratch.path(), opened).unwrap();
    for above in scratch.path().ancestors().skip(1) {
        let mode = std::fs::metadata(above).unwrap().mode();
        assert!(
            mode & 1 == 1,
            "{} is closed to others, and databases refuse to run as root: chmod o+x it, or set TMPDIR",
            above.display()
        );
    }
}

/// Installs a program with this text that all users may execute. Another process writes it: a test
/// that starts a process at this moment would pass on our open file to it, and until that process
/// runs its own program, the kernel would refuse to execute the file ("text file busy").
pub fn install(path: &Path, text: &str) {
    let mut command = Command::new("install");
    command.args(["-m", "755", "/dev/stdin"]).arg(path);
    let mut installer = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut input = installer.stdin.take().unwrap();
    input.write_all(text.as_bytes()).unwrap();
    drop(input);
    assert!(installer.wait().unwrap().success());
}

/// A command that runs as the unprivileged user, in a folder, without our environment.
pub fn as_nobody(program: &Path, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.uid(NOBODY).gid(NOBODY).current_dir(folder);
    command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin");
    command
}

/// A server.
pub struct Daemon {
    child: Child,
    stop: Signal,
    log: PathBuf,
}

impl Daemon {
    /// Starts it; `stop` is the signal that ends it and all its processes.
    pub fn start(mut command: Command, stop: Signal, log: &Path) -> Daemon {
        let file = std::fs::File::create(log).unwrap();
        let both = file.try_clone().unwrap();
        command.stdin(Stdio::null()).stdout(file).stderr(both);
        Daemon {
            child: command.spawn().unwrap(),
            stop,
            log: log.to_path_buf(),
        }
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Its log.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.child.id() as i32);
        let start = std::time::Instant::now();
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = kill(pid, self.stop);
        }
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            if start.elapsed().as_secs() > 20 {
                let _ = kill(pid, Signal::SIGKILL);
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        if std::thread::panicking() {
            eprintln!("--- {} ---\n{}", self.log.display(), self.log());
        }
    }
}

/// A client that answers a line with a line.
pub struct Client {
    child: Child,
    /// `None` once no more input follows.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Client {
    /// Starts it.
    pub fn start(mut command: Command) -> Client {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        Client {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    /// Sends a line. Returns the answer, or `None` if the client has ended.
    pub fn ask(&mut self, line: &str) -> Option<String> {
        let input = self.input.as_mut()?;
        input.write_all(format!("{line}\n").as_bytes()).ok()?;
        let mut answer = String::new();
        let read = self.output.read_line(&mut answer).ok()?;
        (read > 0).then(|| answer.trim_end().to_string())
    }

    /// Sends a last line. Returns the whole answer, which may be empty.
    pub fn ask_once(mut self, line: &str) -> String {
        let input = self.input.take();
        let _ = input.unwrap().write_all(format!("{line}\n").as_bytes());
        let mut answer = String::new();
        let _ = self.output.read_to_string(&mut answer);
        answer.trim_end().to_string()
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes 1, 2, 3 ... in sequence, each after the previous one is acknowledged.
pub struct Writer {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    client: Pid,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts it. `line` is the input for the client that writes a number; the client must answer
    /// with one line.
    pub fn start(mut client: Client, line: impl Fn(u64) -> String + Send + 'static) -> Writer {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = Arc::new(AtomicU64::new(0));
        let pid = client.pid();
        let (stopped, count) = (stop.clone(), acknowledged.clone());
        let thread = std::thread::spawn(move || {
            for number in 1.. {
                if stopped.load(Ordering::SeqCst) || client.ask(&line(number)).is_none() {
                    break;
                }
                count.store(number, Ordering::SeqCst);
            }
        });
        Writer {
            stop,
            acknowledged,
            client: pid,
            thread: Some(thread),
        }
    }

    /// The last acknowledged number. All before it are acknowledged as well.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Waits until more than `count` are acknowledged.
    pub fn goes_beyond(&self, count: u64) {
        slackwater_testkit::eventually("the writer continues", || self.acknowledged() > count);
    }

    /// Stops it after the current write. Returns the last number.
    pub fn stop(mut self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
        self.acknowledged()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // After a panic, the server may never answer again: the client is ended, and with it the
        // thread.
        if let Some(thread) = self.thread.take() {
            self.stop.store(true, Ordering::SeqCst);
            let _ = kill(self.client, Signal::SIGKILL);
            let _ = thread.join();
        }
    }
}

#[test]
fn an_installed_program_runs_while_other_threads_start_processes() {
    let scratch = Scratch::new();
    let program = scratch.join("program");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    assert!(Command::new("true").status().unwrap().success());
                }
            });
        }
        let results: Vec<_> = (0..200)
            .map(|_| {
                install(&program, "#!/bin/sh\n");
                Command::new(&program).status()
            })
            .collect();
        stop.store(true, Ordering::SeqCst);
        for result in results {
            assert!(result.unwrap().success());
        }
    });
}
