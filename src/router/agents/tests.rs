//! Tests of the set of agents, without real agents.

use super::*;

struct Nowhere;

#[tonic::async_trait]
impl Dial for Nowhere {
    async fn dial(&self, node: &str, _address: &str) -> Result<Channel> {
        Err(Error::unreachable(
            node,
            "no connection is made in this test",
        ))
    }
}

/// A set whose agents are never reached.
pub(in crate::router) fn agents() -> Agents {
    Agents::new(Arc::new(Nowhere), "csi.slackwater.dev")
}

fn one(node: &str, address: &str) -> (String, String) {
    (node.to_string(), address.to_string())
}

#[tokio::test]
async fn nothing_is_known_until_each_agent_has_answered_or_failed() {
    let agents = agents();
    let before = agents.all_asked().unwrap_err().to_string();
    assert!(before.contains("not known yet"), "{before}");
    agents.set([one("a", "a:1"), one("b", "b:1")]);
    let asked = agents.all_asked().unwrap_err().to_string();
    assert!(asked.contains("node a"), "{asked}");
    agents.ask_all().await;
    assert!(agents.all_asked().is_ok());
    let problem = agents.of_node("a").unwrap().check().unwrap_err();
    assert!(
        problem.to_string().contains("no connection is made"),
        "{problem}"
    );
}

#[tokio::test]
async fn an_agent_that_stays_is_the_same_one() {
    let agents = agents();
    agents.set([one("a", "a:1"), one("b", "b:1")]);
    let (a, b) = (agents.of_node("a").unwrap(), agents.of_node("b").unwrap());
    let mut changes = agents.changes();
    changes.mark_unchanged();
    agents.set([one("b", "b:2"), one("a", "a:1")]);
    assert!(changes.has_changed().unwrap());
    assert!(Arc::ptr_eq(&a, &agents.of_node("a").unwrap()));
    assert!(!Arc::ptr_eq(&b, &agents.of_node("b").unwrap()));
    agents.set([one("a", "a:1")]);
    assert!(agents.of_node("b").is_none());
    assert_eq!(agents.all().len(), 1);
}
