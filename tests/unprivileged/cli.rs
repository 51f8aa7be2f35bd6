//! The command line: messages, exit codes, files, and a life of the driver from its start to
//! SIGTERM.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "helpers of tests, and the program from outside"
)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use slackwater_testkit::{Scratch, left_out};

/// Long enough for a machine under load.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

fn slackwater(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slackwater"));
    command
        .args(arguments)
        .env_remove("CSI_ENDPOINT")
        .env_remove("RUST_LOG");
    command
}

fn run(arguments: &[&str]) -> Output {
    slackwater(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A command line without `slackwater`, with its exit code and output.
fn output_of(line: &str) -> String {
    let output = run(&line.split_whitespace().collect::<Vec<_>>());
    assert_eq!(stdout(&output), "", "{line}");
    assert_eq!(stderr(&output).lines().count(), 1, "{line}");
    format!(
        "$ slackwater {line}\n{}=> {}\n",
        stderr(&output),
        output.status.code().unwrap()
    )
}

/// People type it for the commands about one volume.
#[test]
fn the_singular_of_volumes_is_the_same_command() {
    for command in ["import", "check"] {
        let helps = ["volume", "volumes"].map(|word| run(&[word, command, "--help"]));
        let [singular, plural] = helps.each_ref().map(stdout);
        assert!(helps[0].status.success(), "{helps:?}");
        assert!(
            singular.contains("Usage:") && singular == plural,
            "{singular}"
        );
    }
}

#[cfg(feature = "fault")]
#[test]
fn an_unknown_fault_is_refused_with_those_that_are_known() {
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    for (program, command) in [
        (env!("CARGO_BIN_EXE_slackwater"), Some("guard")),
        (env!("CARGO_BIN_EXE_slackwater-guard"), None),
    ] {
        let mut guard = Command::new(program);
        guard.args(command).arg("--state-dir").arg(folder.path());
        guard.arg("--socket").arg(folder.path().join("socket"));
        guard.env("SLACKWATER_FAULT", "effect.1:kill,guard.frieze:kill");
        let output = guard.output().unwrap();
        let known = "\"frieze\" is not a step; known are: accepted, begun,";
        assert!(stderr(&output).contains(known), "{output:?}");
        assert!(!output.status.success());
    }
}

#[test]
fn a_bad_command_line_is_one_sentence_and_exit_64() {
    let serve = "serve --endpoint unix:///x/csi.sock --node-name n1 --pool a=memory:";
    let controller = "serve --endpoint unix:///x/csi.sock --role controller";
    let tls = "--tls-cert /does/not/exist --tls-key /x --tls-ca /x";
    let lines = [
        String::new(),
        "serve".into(),
        "serf".into(),
        "guard".into(),
        "frozen --all".into(),
        "frozen --state-dir x".into(),
        "guard --socket s --state-dir /x".into(),
        "populate".into(),
        "pool".into(),
        "pool init".into(),
        "pool init a=memory:".into(),
        "pool init a=file:x".into(),
        "pool adopt a=lvm:vg".into(),
        "volumes --orphans".into(),
        "volumes --pool a=file:/x --pool a=file:/y".into(),
        "serve --endpoint unix:///x/csi.sock".into(),
        "serve --endpoint unix:///x/csi.sock --node-name n1".into(),
        "serve --endpoint tcp://0.0.0.0:1".into(),
        "serve --endpoint unix://x/csi.sock".into(),
        "serve --endpoint unix:///x/../csi.sock".into(),
        "serve --endpoint unix:///x/csi".into(),
        format!("serve --endpoint unix:///{}/csi.sock", "x".repeat(99)),
        "serve --node-name -n".into(),
        "serve --node-name n1.".into(),
        format!("serve --node-name {}", "n".repeat(254)),
        format!("{serve} --bogus"),
        format!("{serve} --role king"),
        format!("{serve} --agent n=1.2.3.4:5"),
        format!("{serve} --agent-service a/b"),
        format!("{serve} --agent-listen 0.0.0.0:1"),
        format!("{serve} --tls-cert /x"),
        format!("{serve} --role node"),
        format!("{serve} --role node --agent-listen here"),
        format!("{serve} --role node --agent-listen 0.0.0.0:1"),
        format!("{serve} --role node --agent-listen 0.0.0.0:1 --tls-cert /x --tls-key /y"),
        format!(
            "{serve} --role node --agent-listen 0.0.0.0:1 --tls-cert /dev/null --tls-key /dev/null --tls-ca /dev/null"
        ),
        format!("{serve} --role node --agent n=1.2.3.4:5"),
        format!(
            "{serve} --role node --node-name {} --agent-listen 0.0.0.0:1 {tls}",
            "n".repeat(64)
        )
        .replace("--node-name n1 ", ""),
        format!("{serve} --role controller"),
        controller.into(),
        format!("{controller} --pool a=memory:"),
        format!("{controller} --allowed-path /x"),
        format!("{controller} --state-dir /x"),
        format!("{controller} --node-record /x"),
        format!("{controller} --agent-listen 0.0.0.0:1"),
        format!("{controller} --agent n"),
        format!("{controller} --agent n=here"),
        format!("{controller} --agent n.=1.2.3.4:5"),
        format!("{controller} --agent n=1.2.3.4:5"),
        format!("{controller} --agent n=1.2.3.4:5 --agent n=1.2.3.4:6 {tls}"),
        format!("{controller} --agent n=1.2.3.4:5 --agent-service a/b {tls}"),
        format!("{controller} --agent-service a"),
        format!("{controller} --agent-service A/b"),
        format!("{controller} --agent-service a/b --tls-cert /x"),
        format!("{controller} --agent n=1.2.3.4:5 {tls}"),
        format!("{controller} --agent n=1.2.3.4:5 --lost-after 24h {tls}"),
        format!("{controller} --agent n=1.2.3.4:5 --metrics-per-volume {tls}"),
        format!("{controller} --agent n=1.2.3.4:5 --page-port 9830 {tls}"),
        format!("{serve} --page-port 9830"),
        format!("{controller} --agent-service a/b --page-port 0"),
        format!("{controller} --agent-service a/b --lost-after 24"),
        format!("{serve} --lost-after 24h"),
        format!("{controller} --agent n=1.2.3.4:5 --recreate-ready-for 5m {tls}"),
        format!("{controller} --agent-service a/b --recreate-ready-for 5s"),
        format!("{serve} --grace-periods soon"),
        format!("{controller} --agent n=1.2.3.4:5 --grace-periods normal {tls}"),
        "certificates".into(),
        "certificates --out /x --node a..b".into(),
        "certificates --out /x --days 0".into(),
        format!("{serve} --driver-name 1.2"),
        format!("{serve} --driver-name a"),
        format!("{serve} --alpha health,helth"),
        format!("{serve} --log-format xml"),
        format!("{serve} --metrics-address 9810"),
        format!("{serve} --allowed-path here"),
        format!("{serve} --pool b=file:/x"),
        format!("{serve} --pool a=memory:"),
        format!("{serve} --pool b=file:/x,image=1Mi"),
        format!("{serve} --config /does/not/exist"),
        format!("{serve} --node-name n2"),
    ];
    let all: Vec<String> = lines.iter().map(|line| output_of(line)).collect();
    assert!(all.iter().all(|text| text.ends_with("=> 64\n")));
    insta::assert_snapshot!(all.join("\n"));
}

/// The help of a command and of those below it, which it lists.
pub fn helps(command: &str) -> Vec<(String, String)> {
    let line = format!("{command} --help").trim().to_string();
    let output = run(&line.split(' ').collect::<Vec<_>>());
    assert_eq!(
        (output.status.code(), stderr(&output)),
        (Some(0), String::new()),
        "{line}"
    );
    let text = stdout(&output);
    let below = text.split_once("\nCommands:\n");
    let below = below.and_then(|(_, rest)| rest.split("\n\n").next());
    let names = below.unwrap_or_default().lines().filter_map(|line| {
        let name = line.strip_prefix("  ")?.split(' ').next()?;
        (!name.is_empty()).then(|| format!("{command} {name}"))
    });
    let below: Vec<_> = names.flat_map(|command| helps(command.trim())).collect();
    let mut all = vec![(line, text)];
    all.extend(below);
    all
}

#[test]
fn help_and_version_are_no_errors() {
    let helps = helps("");
    assert!(helps.len() > 20, "the commands are found");
    let texts = helps
        .iter()
        .map(|(line, text)| format!("$ slackwater {line}\n{text}\n"));
    insta::assert_snapshot!(texts.collect::<String>());
    let version = run(&["--version"]);
    assert_eq!(version.status.code(), Some(0));
    assert_eq!(
        stdout(&version),
        concat!("slackwater ", env!("CARGO_PKG_VERSION"), "\n")
    );
}

#[test]
fn a_bad_file_is_one_sentence_with_its_line() {
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    let path = folder.path().join("c.toml");
    let files = [
        "node-name = 3",
        "\nnode_name = \"n\"",
        "endpoint = \"unix:///x\"",
        "\n\npool = \"a=memory:\"",
        "pool = [\"a=memory:\", \"b=nothing:\"]",
        "[[pool]]\nname = \"a\"\nplace = \"file:/a,b\"\ninitt = true",
        "pool = [\"a=file:/x\"]\n[[pool]]\nname = \"b\"",
        "alpha = [\"helth\"]",
        "role = \"node\"",
        "role = \"king\"",
        "role = \"controller\"\nendpoint = \"unix:///x.sock\"\nagent = \"n=1.2.3.4:5\"",
        "role = \"controller\"\nendpoint = \"unix:///x.sock\"\nagent-service = \"a\"",
        "role = \"node\"\n[[hook]]\nname = \"a\"\ncommand = [\"/x\"]\nvolume = \"*\"",
        "node-name =",
        "hooks = []",
    ];
    let mut all = String::new();
    for text in files {
        fs::write(&path, text).unwrap();
        let output = run(&["serve", "--config", path.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(64), "{text}");
        assert_eq!(stderr(&output).lines().count(), 1, "{text}");
        let sentence = stderr(&output).replace(path.to_str().unwrap(), "c.toml");
        all.push_str(&format!("{text}\n=> {sentence}\n"));
    }
    insta::assert_snapshot!(all);
}

/// A running driver.
struct Serving {
    child: Child,
    socket: PathBuf,
}

impl Serving {
    fn start(folder: &Path, arguments: &[&str]) -> Serving {
        let socket = folder.join("csi").join("csi.sock");
        let endpoint = format!("unix://{}", socket.display());
        let node_record = folder.join("node.json");
        let mut child = slackwater(&["serve", "--endpoint", &endpoint])
            .args(["--node-record", node_record.to_str().unwrap()])
            .args(["--state-dir", folder.join("state").to_str().unwrap()])
            .args(arguments)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            assert!(child.try_wait().unwrap().is_none(), "the driver ended");
            assert!(start.elapsed() < WAIT_TIMEOUT, "the driver does not answer");
            sleep(Duration::from_millis(10));
        }
        Serving { child, socket }
    }

    fn signal(&mut self, signal: Signal) -> Option<i32> {
        let pid = i32::try_from(self.child.id()).unwrap();
        kill(Pid::from_raw(pid), signal).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_signal_ends_the_driver_with_0_and_its_socket_is_removed() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let folder = TempDir::with_prefix("slackwater-").unwrap();
        let arguments = ["--node-name", "n1", "--pool", "default=memory:"];
        let mut serving = Serving::start(folder.path(), &arguments);
        assert_eq!(serving.signal(signal), Some(0));
        assert!(!serving.socket.exists());
        let left = fs::read_dir(serving.socket.parent().unwrap()).unwrap();
        assert_eq!(left.count(), 0, "no other file is left next to the socket");
    }
}

#[test]
fn a_flag_wins_over_the_environment_and_that_over_the_file() {
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    let endpoint = |name: &str| format!("unix://{}/{name}.sock", folder.path().display());
    let file = folder.path().join("c.toml");
    let text = format!(
        "endpoint = {:?}\nnode-name = \"n1\"\npool = [\"default=memory:\"]\n",
        endpoint("file")
    );
    fs::write(&file, text).unwrap();
    let cases: [(&str, Option<&str>, Option<&str>); 4] = [
        ("file", None, None),
        ("file", None, Some("")),
        ("env", None, Some("env")),
        ("flag", Some("flag"), Some("env")),
    ];
    for (expected, flag, env) in cases {
        let mut command = slackwater(&["serve", "--config", file.to_str().unwrap()]);
        if let Some(flag) = flag {
            command.args(["--endpoint", &endpoint(flag)]);
        }
        if let Some(env) = env {
            let value = if env.is_empty() {
                String::new()
            } else {
                endpoint(env)
            };
            command.env("CSI_ENDPOINT", value);
        }
        let child = command.stderr(Stdio::null()).spawn().unwrap();
        let socket = folder.path().join(format!("{expected}.sock"));
        let mut serving = Serving { child, socket };
        let start = Instant::now();
        while UnixStream::connect(&serving.socket).is_err() {
            assert!(start.elapsed() < WAIT_TIMEOUT, "{expected}");
            sleep(Duration::from_millis(10));
        }
        assert_eq!(serving.signal(Signal::SIGTERM), Some(0));
    }
}

#[test]
fn a_socket_in_use_and_a_file_that_is_no_socket_are_left_alone() {
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    let arguments = ["--node-name", "n1", "--pool", "default=memory:"];
    let serving = Serving::start(folder.path(), &arguments);
    let endpoint = format!("unix://{}", serving.socket.display());
    let second = [&["serve", "--endpoint", &endpoint][..], &arguments].concat();
    let output = run(&second);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("is served by another process"),
        "{}",
        stderr(&output)
    );
    assert!(serving.socket.exists());

    let file = folder.path().join("file.sock");
    fs::write(&file, "mine").unwrap();
    let endpoint = format!("unix://{}", file.display());
    let output = run(&[&["serve", "--endpoint", &endpoint][..], &arguments].concat());
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
}

#[test]
fn the_idle_driver_needs_little_memory() {
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    let arguments = ["--node-name", "n1", "--pool", "default=memory:"];
    let serving = Serving::start(folder.path(), &arguments);
    let status = fs::read_to_string(format!("/proc/{}/status", serving.child.id())).unwrap();
    let kilobytes = |key: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    // Private memory only: the file mapping of an unoptimized build differs from that of a release.
    assert!(kilobytes("RssAnon:") < 6 * 1024, "{status}");
    assert!(kilobytes("Threads:") < 10, "{status}");
}

/// A folder on the disk of cargo's files, since /tmp may be a volatile file system.
fn on_disk() -> TempDir {
    TempDir::with_prefix_in("slackwater-", env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// `slackwater pool ...` with a node record of its own.
fn pool(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = slackwater(&["pool"]);
    command.args(arguments).arg("--node-record");
    command.arg(folder.join("node.json")).output().unwrap()
}

fn definition(folder: &Path, name: &str) -> String {
    format!("{name}=file:{}", folder.join(name).display())
}

/// The messages of a command in a folder, without random parts.
fn plain(folder: &Path, text: &str) -> String {
    let text = text.replace(folder.to_str().unwrap(), "DIR");
    let is_id = |word: &str| word.trim_matches([',', '.', ';', ':', ')', '`']).len() == 36;
    let words = text
        .split(' ')
        .map(|word| if is_id(word) { "ID" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn a_pool_is_created_once_listed_and_forgotten_when_it_is_gone() {
    let folder = on_disk();
    let folder = folder.path();
    let a = definition(folder, "a");
    let created = pool(folder, &["init", &a, "--json"]);
    assert_eq!(created.status.code(), Some(0), "{}", stderr(&created));
    let created: serde_json::Value = serde_json::from_slice(&created.stdout).unwrap();
    assert_eq!(created["changed"], true);
    // The folder is not a disk of its own.
    let warnings = created["warnings"].to_string();
    assert!(warnings.contains("otherwise set mount=any"), "{warnings}");
    let again = pool(folder, &["init", &a, "--json"]);
    let again: serde_json::Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(
        (&again["changed"], &again["id"]),
        (&false.into(), &created["id"])
    );

    let list = pool(folder, &["list", "--json"]);
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    assert_eq!(list["pools"][0]["id"], created["id"]);
    assert_eq!(list["pools"][0]["state"], "here");

    let there = pool(folder, &["forget", "a"]);
    assert_eq!(there.status.code(), Some(1));
    fs::rename(folder.join("a"), folder.join("pulled")).unwrap();
    fs::create_dir(folder.join("a")).unwrap();
    let blank = pool(folder, &["init", &a]);
    assert_eq!(blank.status.code(), Some(1));
    assert!(
        stderr(&blank).contains("is its disk mounted?"),
        "{}",
        stderr(&blank)
    );
    assert_eq!(pool(folder, &["forget", "a"]).status.code(), Some(0));
    assert_eq!(pool(folder, &["init", &a]).status.code(), Some(0));
}

/// The paths of all keys in JSON.
fn keys(path: &str, value: &serde_json::Value, found: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (key, value) in fields {
                keys(&format!("{path}.{key}"), value, found);
            }
        }
        serde_json::Value::Array(values) => {
            let path = format!("{path}[]");
            found.insert(path.clone());
            values.iter().for_each(|value| keys(&path, value, found));
        }
        _ => drop(found.insert(path.into())),
    }
}

/// Scripts of users read the keys. The unit tests of `volumes` and `frozen` have those within the lists.
#[test]
fn the_output_of_commands_keeps_its_keys() {
    let folder = on_disk();
    let folder = folder.path();
    let (a, state) = (definition(folder, "a"), folder.join("state"));
    let record = folder.join("node.json");
    let (state, record) = (state.to_str().unwrap(), record.to_str().unwrap());
    let placed = ["--pool", &a, "--node-record", record, "--json"];
    let lines = [
        (
            "pool init",
            vec![a.as_str(), "--node-record", record, "--json"],
        ),
        ("pool adopt", vec!["a", "--node-record", record, "--json"]),
        ("pool list", vec!["--node-record", record, "--json"]),
        ("volumes", placed.to_vec()),
        ("doctor", [&["--state-dir", state][..], &placed].concat()),
        ("frozen", vec!["--state-dir", state, "--json"]),
        ("frozen --thaw", vec!["--state-dir", state, "--json"]),
        ("pool forget", vec!["a", "--node-record", record, "--json"]),
    ];
    let mut all = String::new();
    for (command, arguments) in lines {
        if command == "pool forget" {
            fs::rename(folder.join("a"), folder.join("pulled")).unwrap();
        }
        let words: Vec<_> = command.split(' ').chain(arguments).collect();
        let output = run(&words);
        let json = serde_json::from_slice(&output.stdout);
        let json: serde_json::Value = json.unwrap_or_else(|error| panic!("{error}: {output:?}"));
        let mut found = BTreeSet::new();
        keys("", &json, &mut found);
        let found: Vec<_> = found.into_iter().collect();
        all.push_str(&format!("$ slackwater {command}\n{}\n\n", found.join("\n")));
    }
    insta::assert_snapshot!(all);
}

#[test]
fn a_refused_pool_command_is_one_sentence_and_exit_1() {
    let folder = on_disk();
    let folder = folder.path();
    fs::create_dir_all(folder.join("mine/photos")).unwrap();
    fs::write(folder.join("file"), "").unwrap();
    let acts: [&[&str]; 6] = [
        &["init", &definition(folder, "mine")],
        &["init", &definition(folder, "file")],
        &["init", &format!("a=file:{}", folder.join("x/y").display())],
        &["adopt", &definition(folder, "a")],
        &["adopt", "nobody"],
        &["forget", "nobody"],
    ];
    let mut all = String::new();
    for act in acts {
        let output = pool(folder, act);
        assert_eq!(output.status.code(), Some(1), "{act:?}");
        assert_eq!(stderr(&output).lines().count(), 1, "{act:?}");
        all.push_str(&format!(
            "$ slackwater pool {}\n{}\n",
            plain(folder, &act.join(" ")),
            plain(folder, &stderr(&output))
        ));
    }
    insta::assert_snapshot!(all);
    assert!(folder.join("mine/photos").exists());
    assert!(!folder.join("node.json").exists());
}

#[test]
fn a_pool_on_a_volatile_file_system_is_refused() {
    let Ok(folder) = TempDir::with_prefix_in("slackwater-", "/dev/shm") else {
        return;
    };
    let output = pool(folder.path(), &["init", &definition(folder.path(), "a")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("lost at a reboot"),
        "{}",
        stderr(&output)
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn root_a_second_process_on_a_pool_is_refused() {
    if !nix::unistd::geteuid().is_root() {
        return left_out("a second process on a pool: it needs root");
    }
    // Its own mounts are not to be copied by another test.
    let _turn = Scratch::new();
    let folder = on_disk();
    let folder = folder.path();
    let a = format!("{},init,mount=any", definition(folder, "a"));
    let arguments = ["--node-name", "n1", "--pool", &a];
    let mut serving = Serving::start(folder, &arguments);

    let other = format!("unix://{}", folder.join("other.sock").display());
    let record = folder.join("node.json");
    let second = slackwater(&["serve", "--endpoint", &other])
        .args(arguments)
        .args(["--node-record", record.to_str().unwrap()])
        .args(["--state-dir", folder.join("state").to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    let last = stderr(&second).lines().last().unwrap().to_string();
    assert!(
        last.contains("another slackwater process serves this pool"),
        "{last}"
    );
    assert!(!folder.join("other.sock").exists());

    // A query at the same time disturbs nothing.
    let place = [
        "--pool",
        &definition(folder, "a"),
        "--node-record",
        record.to_str().unwrap(),
    ];
    let volumes = run(&[&["volumes", "--json"][..], &place].concat());
    assert_eq!(volumes.status.code(), Some(0), "{}", stderr(&volumes));
    let state = folder.join("run").join("state");
    let doctor = ["doctor", "--state-dir", state.to_str().unwrap()];
    let doctor = run(&[&doctor[..], &place].concat());
    assert!(stdout(&doctor).contains("froze and thawed a temporary ext4 file system"));
    for fs in ["ext4", "xfs", "btrfs"] {
        let tried = format!("ok    {fs}: a temporary file system was created and mounted");
        assert!(stdout(&doctor).contains(&tried), "{}", stdout(&doctor));
    }
    // It does not create a state directory either.
    assert!(!folder.join("run").exists());
    assert!(
        stdout(&doctor).contains(&format!("served by process {}", serving.child.id())),
        "{}",
        stdout(&doctor)
    );
    assert_eq!(serving.signal(Signal::SIGTERM), Some(0));
    assert!(!folder.join("a").read_dir().unwrap().any(|entry| {
        entry
            .unwrap()
            .file_name()
            .to_string_lossy()
            .starts_with("doctor")
    }));
    let third = Serving::start(folder, &arguments);
    drop(third);
}
