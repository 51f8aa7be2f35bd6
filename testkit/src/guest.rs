//! Tests that need what the machine's kernel lacks: they start themselves again in a guest kernel
//! (tests/guest), and print the guest's output if they fail.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::left_out::{LEFT_OUT, left_out};

/// guest-run's exit code for a guest that gives no sign of life.
const LIFELESS: i32 = 123;
/// User Mode Linux 6.1 sometimes loses its timer (2 of 8 boots on a busy machine, none of 20 on an
/// idle one): it spins in its idle loop and wakes no process.
const TRIES: usize = 3;
/// The time of a test, in seconds. `make soak` has more.
const LIMIT: &str = "1200";
const SOAK_LIMIT: &str = "14400";

/// The number of rounds of a test in a guest: few, or many in `make soak`. The difference is recorded as left
/// out.
pub fn rounds(few: usize, many: usize) -> usize {
    let rounds = crate::rounds(few, many);
    if rounds < many && std::env::var_os("GUEST").is_some() {
        let test = std::env::args().skip_while(|word| word != "--exact").nth(1);
        let test = test.expect("the name of the test");
        left_out(&format!(
            "{} of {many} rounds of {test} (make soak)",
            many - rounds
        ));
    }
    rounds
}

/// Runs `body` in a guest with these disks (`NAME:SIZE`; the guest finds them in
/// `$GUEST_DISK_NAME`). `test` is the name of the calling test.
pub fn in_guest(test: &str, disks: &[&str], body: impl FnOnce()) {
    in_guest_with(&[], test, disks, body);
}

/// The same, with further options of guest-run.
pub fn in_guest_with(options: &[&str], test: &str, disks: &[&str], body: impl FnOnce()) {
    if std::env::var_os("GUEST").is_some() {
        return body();
    }
    for left in (0..TRIES).rev() {
        let mut guest = guest_with(options, test, disks);
        if passes("in the guest", &mut guest, left) {
            return;
        }
    }
}

/// Whether a guest has passed its test. Without a try that is left, a guest that gives no sign of life has
/// failed.
fn passes(what: &str, guest: &mut Command, left: usize) -> bool {
    let output = guest.output().expect(STARTS);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(LIFELESS) && left > 0 {
        eprintln!("no sign of life, {left} tries left: {stdout}{stderr}");
        return false;
    }
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{what}: {}\n{stdout}\n{stderr}",
        output.status
    );
    let lines = stderr
        .lines()
        .filter_map(|line| line.strip_prefix(LEFT_OUT));
    lines.for_each(left_out);
    true
}

/// Runs these parts one after the other, each in a guest of its own. All guests have the same disks
/// (`NAME:SIZE`).
pub fn in_guests(test: &str, disks: &[&str], parts: &[&dyn Fn()]) {
    if let Ok(part) = std::env::var(PHASE) {
        return parts[part.parse::<usize>().expect("the number of a part")]();
    }
    for left in (0..TRIES).rev() {
        let scratch = crate::Scratch::new();
        let disks = kept(&scratch, disks);
        let passed = (0..parts.len()).all(|part| {
            let mut guest = guest_with(&[], test, &disks);
            let what = format!("in part {part}");
            passes(&what, guest.env(PHASE, part.to_string()), left)
        });
        if passed {
            return;
        }
    }
}

/// These disks, in files of this folder.
fn kept(scratch: &crate::Scratch, disks: &[&str]) -> Vec<String> {
    let kept = disks.iter().map(|disk| {
        let (name, size) = disk.split_once(':').expect("NAME:SIZE");
        format!("{name}={}:{size}", scratch.join(name).display())
    });
    kept.collect()
}

const STARTS: &str = "tests/guest/guest-run starts (deploy/deps test installs what it needs)";

/// A guest that runs a test of this program.
fn guest_with(options: &[&str], test: &str, disks: &[impl AsRef<str>]) -> Command {
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/guest/guest-run");
    let mut command = Command::new(run);
    command.args(options);
    command.args(disks.iter().flat_map(|disk| ["--disk", disk.as_ref()]));
    match std::env::var_os("SLACKWATER_SOAK") {
        Some(_) => command
            .args(["--env", "SLACKWATER_SOAK", "--env", "SLACKWATER_SWEEP"])
            .args(["--timeout", SOAK_LIMIT]),
        None => command.args(["--timeout", LIMIT]),
    };
    command
        .arg("--")
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--nocapture"]);
    command
}

/// What tells a guest which part of its test it runs.
const PHASE: &str = "GUEST_TEST_PHASE";
/// What `load` of [`cut_power`] prints when the power may be cut.
const LOADED: &str = "the power may be cut";

/// Announces that the power may be cut from now on.
pub fn loaded() {
    println!("{LOADED}");
}

/// For each of these times: runs `load` in a guest, kills the guest that long after `load` has called
/// [`loaded`], and runs `check` in a new guest. All guests have the same disks (`NAME:SIZE`), which
/// keep every completed write.
pub fn cut_power(
    test: &str,
    disks: &[&str],
    times: &[Duration],
    load: impl FnOnce(),
    check: impl FnOnce(),
) {
    match std::env::var(PHASE).as_deref() {
        Ok("load") => return load(),
        Ok(_) => return check(),
        Err(_) => {}
    }
    let scratch = crate::Scratch::new();
    let disks = kept(&scratch, disks);
    for (cut, time) in times.iter().enumerate() {
        kill_guest(test, &disks, *time, &scratch.join(&cut.to_string()));
        let mut guest = guest_with(&[], test, &disks);
        passes(&format!("after {time:?}"), guest.env(PHASE, "check"), 0);
    }
}

fn kill_guest(test: &str, disks: &[String], time: Duration, files: &Path) {
    let (pid_file, log) = (files.with_extension("pid"), files.with_extension("log"));
    let errors = std::fs::File::create(&log).expect("a log");
    let option = ["--pid-file", pid_file.to_str().expect("UTF-8")];
    let mut command = guest_with(&option, test, disks);
    command
        .env(PHASE, "load")
        .stdout(Stdio::piped())
        .stderr(errors);
    let started = command.spawn();
    let mut guest = started.expect(STARTS);
    let output = BufReader::new(guest.stdout.take().expect("a pipe"));
    let mut lines = output.lines().map_while(Result::ok);
    let is_loaded = lines.any(|line| line.contains(LOADED));
    if !is_loaded {
        let log = std::fs::read_to_string(log).unwrap_or_default();
        panic!("the guest ended: {:?}\n{log}", guest.wait());
    }
    std::thread::sleep(time);
    let pid = std::fs::read_to_string(pid_file).expect("the guest has started");
    let pid = Pid::from_raw(pid.trim().parse().expect("a process ID"));
    kill(pid, Signal::SIGKILL).expect("the guest runs until its power is cut");
    guest.wait().expect("guest-run ends with the guest");
}

/// The device of one of the guest's disks.
pub fn disk(name: &str) -> String {
    let variable = format!("GUEST_DISK_{}", name.to_uppercase());
    std::env::var(&variable).unwrap_or_else(|_| panic!("the guest has no {variable}"))
}
