//! The driver is killed while applications are quiesced.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use super::hook_folder::*;

const FOLDER: &str = "SLACKWATER_TEST_HOOKS";

/// A process that is killed and reaped when it is dropped.
struct Killed(Child);

impl Killed {
    /// Starts this test program again, as the driver of the hooks in a folder.
    fn start(hook_folder: &HookFolder) -> Killed {
        let mut driver = Command::new(std::env::current_exe().unwrap());
        driver
            .args([
                "--exact",
                "hooks::death::holds_until_it_is_killed",
                "--ignored",
            ])
            .env(FOLDER, hook_folder.path(""))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0);
        Killed(driver.spawn().unwrap())
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The driver of the test below: it holds two sessions until it is killed.
#[test]
#[ignore = "is run by the tests below, as another process"]
fn holds_until_it_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    let folder = std::path::PathBuf::from(folder);
    let hook = |name: &str| {
        let program = folder.join(format!("{name}.sh"));
        let parts = slackwater::hook::HookParts {
            name: name.into(),
            command: script(&program),
            volume: Some("*".into()),
            ..Default::default()
        };
        slackwater::hook::HookDefinition::try_from(parts).unwrap()
    };
    let hooks = local(vec![hook("first"), hook("second")]);
    let _held = quiesce(&hooks, &["first", "second"], LONG).unwrap();
    std::fs::write(folder.join("held"), "").unwrap();
    std::thread::sleep(LONG);
}

#[test]
fn a_driver_that_is_killed_releases() {
    let hook_folder = HookFolder::new();
    // The second hook runs on after the driver's end. If it had inherited the writing end of the
    // first one's stdin, the first one would run on as well.
    let first = "echo READY; cat > /dev/null; echo released >> first.log";
    let second = "echo READY; cat > /dev/null; n=0; while [ ! -e go ] && [ $n -lt 6000 ]; do \
                  n=$((n + 1)); sleep 0.01; done; \
                  echo released >> second.log";
    hook_folder.hook("first", first);
    hook_folder.hook("second", second);
    let mut driver = Killed::start(&hook_folder);
    until("the quiesce", || hook_folder.path("held").exists());
    assert_eq!(hook_folder.lines("first.log"), [""; 0]);
    driver.0.kill().unwrap();
    driver.0.wait().unwrap();
    until("the release", || {
        hook_folder.lines("first.log") == ["released"]
    });
    assert_eq!(hook_folder.lines("second.log"), [""; 0]);
    hook_folder.touch("go");
    until("the other release", || {
        hook_folder.lines("second.log") == ["released"]
    });
}

/// It prints READY after its reader is gone, which does not end it before it has released.
#[test]
fn a_driver_that_is_killed_before_ready_releases() {
    let hook_folder = HookFolder::new();
    let slow = "echo quiesced >> log; touch slow; n=0; \
                while [ ! -e go ] && [ $n -lt 6000 ]; do n=$((n + 1)); sleep 0.01; done; \
                echo READY; echo said >> log; cat > /dev/null; echo released >> log";
    hook_folder.hook("first", slow);
    hook_folder.hook("second", "echo READY; cat > /dev/null");
    let mut driver = Killed::start(&hook_folder);
    until("the start", || hook_folder.path("slow").exists());
    driver.0.kill().unwrap();
    driver.0.wait().unwrap();
    hook_folder.touch("go");
    until("the release", || {
        hook_folder.lines("log") == ["quiesced", "said", "released"]
    });
}
