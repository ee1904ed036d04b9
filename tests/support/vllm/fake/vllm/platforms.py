"""A CPU."""


class Platform:
    def is_cpu(self) -> bool:
        return True


current_platform = Platform()
