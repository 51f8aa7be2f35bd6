//! An attempt that is killed, in a process of its own.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use slackwater_populate::config::Config;
use slackwater_populate::report::Report;
use slackwater_populate::run::Attempt;

use crate::server::{Server, Step, broken, object, serves};
use crate::support::{Volume, digest, fill, noise, policy};

/// The configuration of the process that is killed.
const CONFIG: &str = "SLACKWATER_POPULATE_KILLED";

/// Not a test by itself: another one starts it, as a process.
#[test]
fn an_attempt_that_another_test_kills() {
    let Ok(text) = std::env::var(CONFIG) else {
        return;
    };
    let config = Config::parse(&text).expect("it is valid");
    let report = Report::new(std::io::stdout());
    let result = Attempt::prepare(&config, policy(), &report).and_then(|attempt| attempt.run());
    panic!("it ends before it is killed: {result:?}");
}

#[test]
fn an_attempt_after_kill_continues_what_was_durable() {
    let content = noise(5 << 20);
    let half = content.clone();
    let server = Server::new(move |request| {
        let mut steps = broken(object(request, "\"1\"", &half), 4 << 20);
        steps.push(Step::Wait(Duration::from_secs(60)));
        steps
    });
    let volume = Volume::new();
    let limits = json!({"limits": {"durableBytes": 1 << 20, "silenceSeconds": 60}});
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "kill::an_attempt_that_another_test_kills",
            "--nocapture",
        ])
        .env(CONFIG, volume.config(&server.url("/x"), limits).to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut lines = lines.map_while(Result::ok);
    let durable = lines.find_map(|line| {
        // The first line also has the name of the test.
        let line: Value = serde_json::from_str(&line[line.find('{')?..]).ok()?;
        line["durable"]
            .as_u64()
            .filter(|durable| *durable >= 3 << 20)
    });
    child.kill().expect("it is killed");
    child.wait().expect("it ends");
    let durable = durable.expect("a durable point");
    assert_eq!(durable % (1 << 20), 0);
    let server = serves(content.clone());
    let more = json!({
        "resume": {"bytes": durable, "validator": "\"1\""},
        "source": {"http": {"unverified": false, "sha256": digest(&content)}},
    });
    fill(&volume.config(&server.url("/x"), more)).good();
    assert!(volume.read("disk.img") == content);
    let range = format!("bytes={durable}-");
    assert_eq!(server.requests()[0].header("range"), Some(range.as_str()));
}
