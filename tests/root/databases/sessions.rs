//! The sessions in deploy/examples/hooks, each with its real database and without a driver: the
//! database is held between READY and release, and is released in every case.

use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::time::Instant;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use super::engine::{Engine, Run};
use super::process::{Writer, as_nobody, folder, install, open_to_nobody};
use slackwater_testkit::Scratch;

/// The program of an engine's session.
pub fn session(engine: Engine) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("deploy/examples/hooks")
        .join(engine.name())
}

/// A running session, in a process group of its own.
pub struct Session {
    child: Child,
    /// The session ends when it is closed.
    pub stdin: Option<ChildStdin>,
}

impl Session {
    /// Starts a session with a deadline that no test reaches, and waits for its READY.
    pub fn ready(run: &Run, engine: Engine, scratch: &Scratch) -> Session {
        let ready = Session::start(run, engine, 120, scratch);
        ready.unwrap_or_else(|message| panic!("{message:?}: {}", run.log()))
    }

    /// The same with a deadline that is reached soon, but leaves time to check what is held; on a
    /// slow machine it is later.
    pub fn ready_shortly(run: &Run, engine: Engine, scratch: &Scratch) -> Session {
        let mut message = String::new();
        for seconds in [6, 24, 96] {
            let start = Instant::now();
            match Session::start(run, engine, seconds, scratch) {
                // Two thirds of the time are left for the check.
                Ok(session) if start.elapsed().as_secs() < seconds / 3 => return session,
                Ok(_) => {}
                Err(other) => message = other,
            }
        }
        panic!("it is not ready in time; {message:?}: {}", run.log());
    }

    /// Starts a session with a deadline, and waits for its READY. Returns its output if it fails.
    fn start(
        run: &Run,
        engine: Engine,
        seconds: u64,
        scratch: &Scratch,
    ) -> Result<Session, String> {
        // The unprivileged user may be unable to read the sources.
        let program = scratch.join(engine.name());
        install(&program, &std::fs::read_to_string(session(engine)).unwrap());
        let mut command = as_nobody(&program, scratch.path());
        command
            .arg(seconds.to_string())
            .args(run.words())
            .process_group(0);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let mut session = Session { child, stdin };
        let mut line = String::new();
        let output = session.child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        match line.as_str() {
            "READY\n" => Ok(session),
            _ => Err(line),
        }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Returns its exit status. Its stdin stays open until then.
    pub fn end(mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = killpg(self.pid(), Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

/// Fails unless writes are no longer acknowledged, except for those that were in progress at
/// `READY`.
fn assert_held(writer: &Writer) -> u64 {
    let before = writer.acknowledged();
    std::thread::sleep(std::time::Duration::from_millis(500));
    let after = writer.acknowledged();
    assert!(
        after <= before + 1,
        "held at {before}, yet {after} are acknowledged"
    );
    after
}

fn sessions_of(engine: Engine) {
    let scratch = Scratch::new();
    open_to_nobody(&scratch);
    let (data, run) = (
        folder(&scratch.join("files")).join("data"),
        scratch.join("run"),
    );
    engine.make(&data, &[]);
    let server = engine.start(&data, &run, &[]).unwrap();
    let writer = server.writer();
    writer.goes_beyond(100);

    // It ends successfully when its stdin ends.
    let mut session = Session::ready(&server, engine, &scratch);
    let held = assert_held(&writer);
    // Reads continue.
    assert!(server.count() >= held);
    drop(session.stdin.take());
    assert!(session.end().success());
    writer.goes_beyond(held + 100);

    // No process ends it: it ends by itself, and reports a failure.
    let session = Session::ready_shortly(&server, engine, &scratch);
    let held = assert_held(&writer);
    assert!(!session.end().success());
    writer.goes_beyond(held + 100);

    // It can no longer act: its server releases.
    let session = Session::ready_shortly(&server, engine, &scratch);
    killpg(session.pid(), Signal::SIGSTOP).unwrap();
    let held = assert_held(&writer);
    writer.goes_beyond(held + 100);
    drop(session);

    // It is killed: the server releases at once or at the deadline.
    let session = Session::ready_shortly(&server, engine, &scratch);
    let held = assert_held(&writer);
    kill(session.pid(), Signal::SIGKILL).unwrap();
    assert_eq!(session.end().signal(), Some(9));
    writer.goes_beyond(held + 100);
    let acknowledged = writer.stop();
    assert_eq!(server.count(), acknowledged);
}

#[test]
fn the_session_of_postgresql_holds_and_always_releases() {
    sessions_of(Engine::PostgreSql);
}

#[test]
fn the_session_of_mariadb_holds_and_always_releases() {
    sessions_of(Engine::MariaDb);
}

#[test]
fn the_session_of_redis_holds_and_always_releases() {
    sessions_of(Engine::Redis { append_only: true });
}
