from attention.suite import AttentionSuite


class TestReference(AttentionSuite):
    implementation = "reference"
