//! Agents that die or are late in the middle of a cut: no snapshot is kept, no file system stays
//! frozen, and a repeat with the same name results in one consistent group.

use nix::sys::signal::Signal;
use tonic::Status;

use slackwater_testkit::WAIT_TIMEOUT;
use slackwater_testkit::cluster::{Cluster, Volume, ids};
use slackwater_testkit::eventually;
use slackwater_testkit::writers::Writers;

const PARAMETERS: [(&str, &str); 2] = [("freezeTimeout", "30s"), ("retries", "0")];
/// Short, so that file systems frozen by a stopped agent are thawed soon. The test uses the first
/// timeout at which the other agents of a slow machine are not late themselves.
const SHORT: [&str; 3] = ["2s", "10s", "30s"];

/// Every third effect of each agent in turn. A cut has more than 20 effects at each agent.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_killed_at_any_effect_of_a_cut_leaves_nothing_frozen_or_torn() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    let writers = Writers::start(&volumes);
    let mut swept = [0; 2];
    for (which, swept) in swept.iter_mut().enumerate() {
        let mut has_paused = false;
        for n in (1..).step_by(3) {
            let fault = format!("effect.{n}:kill");
            let context = format!("agent {which}, {fault}");
            let name = format!("g-{which}-{n}");
            cluster.agents[which].arm(&fault);
            // The router has found the agent again.
            cluster.listed(&context).await;
            let client = &cluster.router.client;
            let asked = ids(&volumes);
            let call = client.group(&name, &asked, &PARAMETERS);
            let answer = tokio::time::timeout(WAIT_TIMEOUT, call).await;
            let answer = answer.unwrap_or_else(|_| panic!("{context}: the call hangs"));
            let lived = cluster.agents[which].server.is_alive();
            writers.assert_flowing(&context);
            if let Err(status) = &answer {
                let code = status.code();
                let again = matches!(code, tonic::Code::Unavailable | tonic::Code::Aborted);
                assert!(
                    again,
                    "{context}: not final, because the result is unknown: {status}"
                );
            }
            cluster.agents[which].restart_with(&[]);
            cluster.assert_thawed(&writers, &context);
            cluster.assert_none_or_all(&volumes, &context).await;
            // Once the file systems were frozen, a repeat within a minute is refused. The test
            // waits for one such minute at each agent; after that, a new router without that memory
            // repeats the call.
            let client = cluster.router.client.clone();
            let repeat = client.group(&name, &asked, &PARAMETERS).await;
            let is_paused = repeat.is_err_and(|status| status.message().contains("paused for"));
            if is_paused && std::mem::replace(&mut has_paused, true) {
                cluster.restart_router(&[]).await;
            }
            let comes = cluster.assert_comes_to_one(&name, &volumes, &PARAMETERS, &context);
            let group = comes.await;
            if let Ok(first) = &answer {
                assert_eq!(first, &group, "{context}: an answer stays");
            }
            if lived && answer.is_ok() {
                break;
            }
            *swept += 1;
        }
    }
    assert!(swept.iter().all(|swept| *swept > 5), "{swept:?}");
    drop(writers);
    cluster.tear_down(volumes).await;
}

/// A cut in which an agent stops at a step, and continues after the end of the call. Returns the
/// answer.
async fn stopped_at(
    cluster: &mut Cluster,
    volumes: &[Volume],
    writers: &Writers,
    (which, step): (usize, &str),
    limit: &str,
) -> Status {
    let context = format!("agent {which}, {step}, {limit}");
    cluster.agents[which].arm(step);
    cluster.listed(&context).await;
    let (client, asked, name) = (cluster.router.client.clone(), ids(volumes), context.clone());
    let class = [
        ("freezeTimeout", limit.to_string()),
        ("retries", "0".into()),
    ];
    let call = tokio::spawn(async move {
        let class = class.each_ref().map(|(key, value)| (*key, value.as_str()));
        client.group(&name, &asked, &class).await
    });
    eventually(
        &format!("{context}: the agent has reached the step"),
        || cluster.agents[which].is_stopped() || call.is_finished(),
    );
    writers.assert_flowing(&context);
    let answer = tokio::time::timeout(WAIT_TIMEOUT, call).await;
    let status = answer.expect("the call ends").unwrap().unwrap_err();
    cluster.agents[which].server.signal(Signal::SIGCONT);
    cluster.assert_thawed(writers, &context);
    cluster.agents[which].restart_with(&[]);
    cluster.assert_none_or_all(volumes, &context).await;
    status
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_late_blocks_no_application_and_no_snapshot_is_kept() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    let writers = Writers::start(&volumes);
    for step in [
        (1, "effect.guard_freeze:stop"),
        (0, "effect.guard_freeze:stop-after"),
        (1, "effect.guard_thaw:stop"),
        (1, "effect.guard_written:stop"),
    ] {
        let mut messages = Vec::new();
        for limit in SHORT {
            let status = stopped_at(&mut cluster, &volumes, &writers, step, limit).await;
            let is_reported = status.code() == tonic::Code::Unavailable
                && status.message().contains(&cluster.agents[step.0].name);
            messages.push(status);
            if is_reported {
                let context = format!("agent {}, {}, {limit}", step.0, step.1);
                let comes = cluster.assert_comes_to_one(&context, &volumes, &PARAMETERS, &context);
                comes.await;
                messages.clear();
                break;
            }
        }
        assert!(
            messages.is_empty(),
            "{step:?}: the late agent is named: {messages:?}"
        );
    }
    drop(writers);
    cluster.tear_down(volumes).await;
}
