"""Objects of a cluster in memory, for tests of what creates and removes them."""

import contextlib


class Objects:
    """In the place of a ClusterApi: the objects by their kinds. fails: {kind: error of its creation}. late: kinds that exist
    although their creation has failed. asked: whether the user's name was."""

    namespace, where = "team", "one (example:6443)"

    def __init__(self, fails=(), late=()):
        self.objects, self.fails, self.late = {}, dict(fails), late
        self.created, self.deleted, self.patient, self.asked = [], [], 0, False

    @contextlib.contextmanager
    def patiently(self):
        self.patient += 1
        yield
        self.patient -= 1

    def user(self):
        self.asked = True
        return "ann"

    def validate(self, one):
        assert not self.created

    def create(self, one):
        assert self.patient, "a request that is left alone can create an object later"
        kind = one["kind"]
        made = {**one, "metadata": {**one["metadata"], "uid": f"uid-{kind}"}}
        if kind not in self.fails or kind in self.late:
            self.objects[kind] = made
        if kind in self.fails:
            raise self.fails[kind]
        self.created.append(kind)
        return made

    def get(self, kind, name):
        return self.objects.get(kind)

    def delete(self, kind, name, uid=""):
        assert self.patient
        assert uid == self.objects[kind]["metadata"]["uid"]
        self.deleted.append(kind)
        del self.objects[kind]
        return True
