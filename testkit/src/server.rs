//! The driver as a separate process.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Client, Scratch, eventually, slackwater, state_of, without_configuration};

/// The program under test, which cargo builds next to the folder of test programs.
pub fn binary() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| {
        let tests = std::env::current_exe().unwrap();
        let program = tests.parent().unwrap().with_file_name("slackwater");
        program.to_str().unwrap().to_string()
    });
    &PATH
}

/// A running driver. When it is dropped, the process is killed and reaped.
pub struct Server {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
    wrapper: Vec<String>,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Server {
    /// Starts a driver with pools as `--pool` takes them, and waits until it answers.
    pub fn start(scratch: &Scratch, pools: &[&str]) -> Server {
        let server = Server::spawn(scratch, pools, &[], &[]);
        server.wait_ready();
        server
    }

    /// Starts a driver through a program that executes it, and waits until it answers.
    pub fn wrapped(scratch: &Scratch, wrapper: &[&str], pools: &[&str]) -> Server {
        let server = Server::spawn_wrapped(scratch, wrapper, pools, &[], &[]);
        server.wait_ready();
        server
    }

    /// Starts a driver with further arguments and environment, without waiting.
    pub fn spawn(
        scratch: &Scratch,
        pools: &[&str],
        more: &[&str],
        environment: &[(&str, &str)],
    ) -> Server {
        Server::spawn_wrapped(scratch, &[], pools, more, environment)
    }

    /// The same, through a program that executes it.
    pub fn spawn_wrapped(
        scratch: &Scratch,
        wrapper: &[&str],
        pools: &[&str],
        more: &[&str],
        environment: &[(&str, &str)],
    ) -> Server {
        let wrapper: Vec<String> = wrapper.iter().map(|word| word.to_string()).collect();
        let socket = scratch.dir("csi").join("csi.sock");
        let text = |path: &Path| path.to_str().unwrap().to_string();
        let mut arguments: Vec<String> =
            vec!["serve".into(), "--node-name".into(), "node-1".into()];
        for (flag, value) in [
            ("--endpoint", format!("unix://{}", socket.display())),
            ("--state-dir", text(&scratch.join("state"))),
            ("--node-record", text(&scratch.join("node.json"))),
            ("--allowed-path", text(&scratch.dir("kubelet"))),
            ("--inline-max-size", "1Gi".into()),
        ] {
            arguments.extend([flag.to_string(), value]);
        }
        for pool in pools {
            arguments.extend(["--pool".to_string(), pool.to_string()]);
        }
        for word in more {
            let given = arguments.iter().position(|flag| flag == word);
            // A flag that is given again replaces the default: its value follows in `more`.
            if let Some(at) = given.filter(|_| word.starts_with("--")) {
                arguments.drain(at..at + 2);
            }
            arguments.push(word.to_string());
        }
        let environment: Vec<_> = environment
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect();
        let log = scratch.join("log");
        let child = launch(&wrapper, &arguments, &environment, &log);
        Server {
            child,
            socket,
            log,
            wrapper,
            arguments,
            environment,
        }
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process ID.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Everything that it has logged, including earlier runs.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Creates a client.
    pub fn client(&self) -> Client {
        Client::new(&self.socket)
    }

    /// Waits until it answers Probe.
    pub fn wait_ready(&self) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let socket = self.socket.clone();
        let ready = std::thread::spawn(move || {
            eventually("the driver is ready", || {
                runtime.block_on(async { Client::new(&socket).is_ready().await })
            });
        });
        if ready.join().is_err() {
            panic!("the driver does not get ready; its log:\n{}", self.log());
        }
    }

    /// Runs `slackwater export` or `slackwater import`. Returns whether it succeeded, stdout and stderr.
    pub fn archive(&self, words: &[&str], input: &[u8]) -> (bool, Vec<u8>, String) {
        let mut command = archive_command(&self.socket, words);
        command.stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        // A refused import closes its stdin early.
        let sent = std::thread::spawn(move || drop(stdin.write_all(&input)));
        let output = child.wait_with_output().unwrap();
        sent.join().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), output.stdout, said)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Whether it is stopped (SIGSTOP) and was not continued.
    pub fn is_stopped(&self) -> bool {
        state_of(&Path::new("/proc").join(self.pid().to_string()).join("stat")) == Some('T')
    }

    /// Waits for its end. Returns its exit code, `None` after a signal.
    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    /// Kills it, as the out-of-memory killer would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Starts it again with the same arguments, after it has ended, with another environment.
    pub fn restart_with(&mut self, environment: &[(&str, &str)]) {
        self.respawn_with(environment);
        self.wait_ready();
    }

    /// The same, without waiting until it answers.
    pub fn respawn_with(&mut self, environment: &[(&str, &str)]) {
        self.kill();
        self.environment = environment
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect();
        self.child = launch(&self.wrapper, &self.arguments, &self.environment, &self.log);
    }

    /// Kills it and starts it again with the same arguments.
    pub fn restart(&mut self) {
        self.restart_with(&[]);
    }
}

/// A command of archives, which connects to the driver at this socket.
pub fn archive_command(socket: &Path, words: &[&str]) -> Command {
    let endpoint = format!("unix://{}", socket.display());
    let mut command = slackwater();
    command.args(words).args(["--endpoint", &endpoint]);
    command
}

fn launch(
    wrapper: &[String],
    arguments: &[String],
    environment: &[(String, String)],
    log: &Path,
) -> Child {
    let file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .unwrap();
    let mut words = wrapper.iter().map(String::as_str).chain([binary()]);
    let mut command = without_configuration(Command::new(words.next().unwrap_or(binary())));
    command
        .args(words)
        .args(arguments)
        .envs(environment.iter().cloned())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(file)
        .spawn()
        .unwrap()
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = kill(self.pid(), Signal::SIGCONT);
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- the driver's log ---\n{}", self.log());
        }
    }
}
